"""Files in the layouts of known data sets, and the command that trains on them."""

import json

import numpy as np
import torch

from tests.helpers.commandline import CONFIGS, FEDAVG, SMALL, files, lcfl


def write_leaf(folder, part, number=0, **user_data):
    """Writes a file of LEAF's scripts, with the samples ``(x, y)`` of each user, and returns its path."""
    path = folder / part / f"all_data_{number}_niid_0_keep_0_{part}_9.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(user_data),
        "num_samples": [len(y) for _, y in user_data.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in user_data.items()},
    }
    path.write_text(json.dumps(content))
    return path


def images(number, seed=0):
    """Returns images as FEMNIST has them, lists of bytes divided by 255, and labels."""
    draw = np.random.default_rng(seed)
    return (draw.integers(0, 256, (number, 784)) / 255).tolist(), draw.integers(0, 62, number).tolist()


def texts(number, alphabet, seed=0):
    """Returns texts of 80 characters and the next character of each."""
    draw = np.random.default_rng(seed)
    letters = ["".join(draw.choice(list(alphabet), 81)) for _ in range(number)]
    return [each[:80] for each in letters], [each[80] for each in letters]


def trained(name, *words):
    """Trains two rounds with a file of configs/data, at once, with a break, and on random data; returns the run."""
    data = ("fit", "-c", CONFIGS / f"data/{name}.yaml") if name else ("fit",)
    command = (*data, *FEDAVG, *SMALL, *words)
    whole = lcfl(*command, "--trainer.name=whole")
    lcfl(*command, "--trainer.name=halves", "--trainer.rounds=1")
    halves = lcfl(*command, "--trainer.name=halves", "--ckpt_path=last")
    assert halves.state.round == whole.state.round == 2
    assert torch.equal(whole.state.global_model, halves.state.global_model)
    assert not torch.equal(whole.state.global_model, whole.state.initial)
    before = files(whole.path.parents[1])
    assert lcfl(*command, "--trainer.fast_dev_run=true").metrics
    assert files(whole.path.parents[1]) == before
    return whole
