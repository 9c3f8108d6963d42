"""Every method trains on a device whose tensors do not mix with those of the CPU, and gives the same federation there.

The device is simulated (`tests.helpers.simulated_device`), so that a first run on a GPU finds no tensor in the wrong
place. Autocast does not know the device, so all runs are in float32.
"""

import numpy as np
import pytest
import torch

from tests.engines.test_methods import METHODS, UNEQUAL, assert_agree
from tests.helpers.fits import fit
from tests.helpers.simulated_device import simulated  # noqa: F401

QUICK = {("sequential", "lcfed"), ("stacked", "ifca")}


def pairs():
    for engine in ("sequential", "stacked"):
        for method in METHODS:
            marks = [] if (engine, method) in QUICK else [pytest.mark.slow]
            yield pytest.param(engine, method, marks=marks)


@pytest.mark.parametrize(("engine", "method"), list(pairs()))
def test_every_method_trains_on_a_device(tmp_path, request, engine, method):
    words = [*UNEQUAL, "--data.num_clients=12", "--trainer.clients_per_round=4", f"--trainer.engine={engine}"]
    runs = [fit(tmp_path / "cpu", method, 1, 2, *words).path]
    request.getfixturevalue("simulated")
    runs.append(fit(tmp_path / "device", method, 1, 2, *words).path)
    assert_agree(runs)


class Misplaced(torch.nn.Module):
    """A network that adds a tensor which is always on the CPU."""

    def __init__(self):
        super().__init__()
        self.embedding, self.decision = torch.nn.Linear(16, 4), torch.nn.Linear(4, 8)

    def forward(self, inputs):
        return self.decision(self.embedding(inputs)) + torch.zeros(8)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_tensor_in_the_wrong_place_is_an_error(tmp_path, simulated, engine):  # noqa: F811
    with pytest.raises(Exception, match="expected all tensors on one device, got some on meta and some on cpu"):
        fit(tmp_path, "fedavg", 1, 1, f"--model.network={__name__}.Misplaced", f"--trainer.engine={engine}")


def test_values_of_the_simulated_device(simulated):  # noqa: F811
    made = [
        torch.ones(3, device=simulated),
        torch.tensor([1.0, 1.0, 1.0], device=simulated),
        torch.ones(3).to(simulated),
    ]
    assert all(each.device == simulated and each.tolist() == [1.0, 1.0, 1.0] for each in made)
    places = torch.tensor([0, 2])
    assert made[0][places].device == simulated and made[0].cpu().device.type == "cpu"
    assert float((made[0] * torch.tensor(2.0)).sum()) == 6.0  # a number may be anywhere
    for misplaced in (lambda: made[0] + torch.ones(3), lambda: torch.ones(3)[places.to(simulated)]):
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            misplaced()
    for convert in (made[0].numpy, lambda: np.asarray(made[0])):
        with pytest.raises(TypeError, match="can't convert a tensor on meta to numpy"):
            convert()
