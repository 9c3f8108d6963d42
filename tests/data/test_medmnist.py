"""Tests of the loader of MedMNIST, on files that are made in its layout."""

import re

import numpy as np
import pytest
import torch

from lcfl.data.augmentation import CropAndFlip
from lcfl.data.datasets import MedMNIST
from tests.helpers.known_sets import trained

CPU = torch.device("cpu")
SIZES = {"train": 12, "val": 5, "test": 7}


def write(folder, flag, size=28, **changed):
    """Writes a set's file and returns its path and its arrays."""
    classes, channels = MedMNIST.SETS[flag]
    draw, arrays = np.random.default_rng(0), {}
    sides = [size] * (3 if flag.endswith("3d") else 2) + ([3] if channels == 3 else [])
    for part, number in SIZES.items():
        arrays[f"{part}_images"] = draw.integers(0, 256, (number, *sides), dtype=np.uint8)
        labels = draw.integers(0, 2, (number, 14)) if flag == "chestmnist" else draw.integers(0, classes, (number, 1))
        arrays[f"{part}_labels"] = labels.astype(np.uint8)
    arrays |= changed
    path = folder / (f"{flag}.npz" if size == 28 else f"{flag}_{size}.npz")
    np.savez(path, **{key: array for key, array in arrays.items() if array is not None})
    return path, arrays


@pytest.mark.parametrize(
    ("flag", "size", "shape"),
    [
        ("pathmnist", 28, (3, 28, 28)),
        ("pneumoniamnist", 64, (1, 64, 64)),
        ("organmnist3d", 28, (1, 28, 28, 28)),
    ],
)
def test_images_come_back_with_their_classes(tmp_path, flag, size, shape):
    _, arrays = write(tmp_path, flag, size)
    dataset = MedMNIST(flag, str(tmp_path), size, normalisation="none")
    dataset.prepare()
    samples = dataset.load()
    assert dataset.shape == shape and samples.inputs.dtype == torch.uint8 and samples.num_train == 17
    inputs, labels = samples.batch(range(24), CPU)
    stored = np.concatenate([arrays[f"{part}_images"] for part in SIZES]) / 255
    np.testing.assert_allclose(inputs, np.moveaxis(stored, -1, 1) if shape[0] == 3 else stored[:, None], atol=1e-6)
    assert labels.tolist() == np.concatenate([arrays[f"{part}_labels"][:, 0] for part in SIZES]).tolist()
    assert dataset.num_classes == MedMNIST.SETS[flag][0] and dataset.owners() is None
    half = MedMNIST(flag, str(tmp_path), size).load().batch(range(24), CPU)[0]
    torch.testing.assert_close(half, 2 * inputs - 1, rtol=0, atol=1e-6)


def test_validation_images_may_be_left_out(tmp_path):
    _, arrays = write(tmp_path, "breastmnist")
    samples = MedMNIST("breastmnist", str(tmp_path), val="unused").load()
    assert samples.num_train == 12 and len(samples) == 19
    assert np.array_equal(samples.inputs[12:, 0], arrays["test_images"])


def test_chests_have_fourteen_labels(tmp_path):
    _, arrays = write(tmp_path, "chestmnist")
    dataset = MedMNIST("chestmnist", str(tmp_path))
    samples = dataset.load()
    _, targets = samples.batch(range(24), CPU)
    assert targets.dtype == dataset.target_dtype == torch.float32 and dataset.target_shape == (14,)
    assert np.array_equal(targets, np.concatenate([arrays[f"{part}_labels"] for part in SIZES]))
    assert dataset.num_classes is samples.num_classes is samples.labels is None


WRONG = {
    "key": ({"val_labels": None}, r"has no val_labels; is it a file of MedMNIST\?"),
    "colour": (
        {"train_images": np.zeros((12, 28, 28), np.uint8)},
        r"train_images in .* must be uint8 of shape \['n', 28, 28, 3\], got uint8 of \[12, 28, 28\]",
    ),
    "type": ({"test_images": np.zeros((7, 28, 28, 3))}, r"test_images .* must be uint8 .*, got float64"),
    "number": (
        {"val_labels": np.zeros((4, 1), np.uint8)},
        r"val_labels .* must be whole numbers of shape \[5, 1\], got uint8 of \[4, 1\]",
    ),
    "class": ({"val_labels": np.full((5, 1), 9, np.uint8)}, r"val_labels .* must lie in 0 to 8, got 9 to 9"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_files_are_refused(tmp_path, case):
    changed, message = WRONG[case]
    path, _ = write(tmp_path, "pathmnist", **changed)
    with pytest.raises(ValueError, match=message) as caught:
        MedMNIST("pathmnist", str(tmp_path)).load()
    assert str(caught.value).startswith("MedMNIST: ") and repr(str(path)) in str(caught.value)


def test_damaged_files_are_refused(tmp_path):
    path, _ = write(tmp_path, "pathmnist")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"MedMNIST: {re.escape(repr(str(path)))} cannot be read .*download it again"):
        MedMNIST("pathmnist", str(tmp_path)).prepare()
    path.write_bytes(whole[:2000] + bytes(1000) + whole[3000:])
    with pytest.raises(ValueError, match=r"MedMNIST: train_images in .* cannot be read .*CRC"):
        MedMNIST("pathmnist", str(tmp_path)).load()


def test_missing_files_are_said_with_the_way_to_get_them(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"MedMNIST: there is no file '.*pathmnist_64.npz'. .*--size=64"):
        MedMNIST("pathmnist", str(tmp_path), 64).prepare()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flag": "mnist"}, "got flag='mnist'; allowed are pathmnist, .* and synapsemnist3d"),
        ({"flag": "pathmnist", "size": 32}, "got size=32; allowed are 28, 64, 128 and 224"),
        ({"flag": "organmnist3d", "size": 128}, "got size=128; allowed are 28 and 64"),
        ({"flag": "organmnist3d", "augmentation": CropAndFlip()}, "organmnist3d has volumes, .* leave it out"),
        ({"flag": "pathmnist", "val": "test"}, "got val='test'; allowed are train and unused"),
        ({"flag": "pathmnist", "normalisation": "standard"}, "got normalisation='standard'; allowed are half and none"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^MedMNIST: {message}"):
        MedMNIST(**options)


def test_images_train_and_resume_to_the_same_bits(here):
    (here / "data").mkdir()
    draw = np.random.default_rng(1)
    images = draw.integers(0, 256, (120, 28, 28, 3), dtype=np.uint8)
    write(here / "data", "pathmnist", train_images=images, train_labels=draw.integers(0, 9, (120, 1)).astype(np.uint8))
    run = trained("medmnist_path", "--data.num_clients=5", "--data.dataset.init_args.augmentation=CropAndFlip")
    assert run.state.num_clients == 5 and "test/own_split/global/acc" in run.metrics


def test_fourteen_labels_train_with_their_own_loss_and_metric(here):
    (here / "data").mkdir()
    write(here / "data", "chestmnist")
    (here / "chest.yaml").write_text(CHEST)
    run = trained(None, "-c", "chest.yaml")
    assert 0 < run.metrics["test/own_split/global/loss"] < 1 and "test/own_split/global/acc" not in run.metrics


CHEST = """
data:
  dataset: {class_path: MedMNIST, init_args: {flag: chestmnist}}
  partition: IID
  num_clients: 4
model:
  network: {class_path: lcfl.models.MLP, init_args: {in_features: 784, hidden: [8], num_classes: 14}}
  loss: torch.nn.BCEWithLogitsLoss
  report: loss
"""
