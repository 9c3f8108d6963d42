"""A run resumes from a checkpoint whose content was changed, or it is refused in words and nothing on disk changes.

Each case changes one value of a real checkpoint, and its hashes to match.
"""

import shutil

import pytest
import torch

from lcfl.federation.federation import Federation
from lcfl.methods.clustering import ClusterNumberTuning
from lcfl.runs.checkpoint import CheckpointError
from lcfl.runs.serialization import deserialized, serialized
from tests.helpers.builders import blobs, blobs_module, fedac, fednova, lcfed
from tests.helpers.checkpoints import replace_part
from tests.helpers.clustered import cfl, clove, fedgroup, fesem, fl_hc, ifca, pacfl
from tests.helpers.commandline import files

METHODS = {
    "lcfed": lcfed,
    "fedac": lambda: fedac(tuning=ClusterNumberTuning(criterion="ratio")),
    "fednova": lambda: fednova(momentum=0.5),
    "fesem": fesem,
    "cfl": cfl,
    "fedgroup": fedgroup,
    "fl_hc": fl_hc,
    "ifca": lambda: ifca(max_redraws=2),
    "clove": lambda: clove(stable_rounds=1),
    "pacfl": pacfl,
}
SPOILED = {  # what takes the place of a value, by name
    "None": lambda value: None,
    "text": lambda value: "x",
    "list": lambda value: [value],
    "dict": lambda value: {"x": value},
    "NaN": lambda value: float("nan"),
    "negative": lambda value: -3,
    "huge": lambda value: 2**62,
    "true": lambda value: True,
}
SPOILED_TENSORS = {
    "short": lambda value: value[:-1],
    "long": lambda value: torch.cat([value, value[:1], value[:1]]),
    "empty": lambda value: value[:0],
    "scalar": lambda value: value.reshape(-1)[:1].sum(),
    "deeper": lambda value: value[None],
    "double": lambda value: value.double(),
    "integer": lambda value: value.long() if value.dtype != torch.int64 else value.int(),
    "minus": lambda value: -value.float().to(value.dtype) - 7,
    "far": lambda value: (value.float() + 2**40).to(value.dtype),
    "not finite": lambda value: torch.full_like(value, float("nan") if value.is_floating_point() else 1),
    "expanded": lambda value: (
        value.reshape(-1)[:1].expand(2**33) if value.numel() else value.new_zeros(1).expand(2**33)
    ),
    "complex": lambda value: value.to(torch.complex64),
    "sparse": lambda value: value.float().to_sparse(),
}


def leaves(value, path=()):
    """Yields the path of every value in a nested dict."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves(item, (*path, number))


def changed(value, path, change):
    """Returns a copy in which the value at the path is changed; None removes it."""
    if not path:
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(changed(item, path[1:], change) if path[0] == n else item for n, item in enumerate(value))
    if change is None and len(path) == 1:
        return {key: item for key, item in value.items() if key != path[0]}
    return {key: changed(item, path[1:], change) if key == path[0] else item for key, item in value.items()}


def at(value, path):
    for key in path:
        value = value[key]
    return value


def federation(root, rounds):
    return Federation(
        rounds=rounds,
        clients_per_round=6,
        evaluate_every=2,
        accelerator="cpu",
        devices=1,
        engine="sequential",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=root,
        name="run",
    )


def parts(method):
    return blobs_module(), blobs(), METHODS[method]()


@pytest.fixture(scope="module")
def run(request, tmp_path_factory):
    """The root of a run of two rounds, and the name of the method."""
    root = tmp_path_factory.mktemp("run")
    federation(root, 2).fit(*parts(request.param))
    return root, request.param


def resume(root, method):
    """Resumes, and returns the error in words; any other error fails the test.

    Values that are not finite are no error of the checkpoint's form. A clustering may refuse them once the run goes on.
    """
    folder = root / "run" / "version_0"
    before = files(folder)
    (path,) = (folder / "checkpoints").glob("round-000002.ckpt")
    try:
        federation(root, 3).fit(*parts(method), ckpt_path=str(path))
    except CheckpointError as error:
        assert files(folder) == before
        return str(error)
    except ValueError as error:
        assert "got no usable model" in str(error)
    return None


def cases(path):
    """Yields (name, function that spoils a checkpoint) for each value in each part and each change."""
    names = sorted(file.name for file in path.glob("*.pt"))
    for name in names:
        content = deserialized((path / name).read_bytes())
        for place in leaves(content):
            value = at(content, place)
            changes = SPOILED | (SPOILED_TENSORS if isinstance(value, torch.Tensor) else {})
            if place and isinstance(at(content, place[:-1]), dict):
                changes = changes | {"gone": None}
            for word, change in changes.items():
                if word in ("short", "long", "empty") and value.dim() == 0:
                    continue
                yield f"{name}{list(place)}: {word}", name, content, place, change


@pytest.mark.slow
@pytest.mark.parametrize("run", METHODS, indirect=True)
def test_every_changed_value_is_refused_in_words_or_harmless(tmp_path, run):
    root, method = run
    original = root / "run" / "version_0" / "checkpoints" / "round-000002.ckpt"
    refused = 0
    for name, part, content, place, change in cases(original):
        copy = tmp_path / "copy"
        shutil.copytree(root, copy)
        path = copy / original.relative_to(root)
        try:
            spoiled = changed(content, place, change)
        except (RuntimeError, IndexError):  # the change is not possible for this tensor
            shutil.rmtree(copy)
            continue
        replace_part(path, part, serialized(spoiled))
        try:
            refused += resume(copy, method) is not None
        except BaseException as error:
            error.add_note(name)
            raise
        shutil.rmtree(copy)
    assert refused > 100
