"""Tests the reader of .npz files: kinds of targets and inputs, and what is refused."""

import numpy as np
import pytest
import torch

from lcfl.core import memory
from lcfl.data.datasets import Arrays, Folders
from tests.helpers.clients_on_disk import write_arrays

X = np.arange(12, dtype=np.float64).reshape(3, 4)


def dataset(root, **options):
    return Folders(str(root), Arrays(**options))


def refused(root, **options):
    with pytest.raises(ValueError) as error:
        dataset(root, **options).load()
    return str(error.value).replace(str(root), "ROOT")


def test_whole_numbers_are_classes_of_all_clients(tmp_path):
    write_arrays(tmp_path / "a/1.npz", x=X, y=np.array([7, 30, 7], dtype=np.int32))
    write_arrays(tmp_path / "a/2.npz", x=X[:1] + 100, y=np.array([9], dtype=np.uint8))
    write_arrays(tmp_path / "b.npz", x=X.astype(np.float32) + 200, y=np.array([30, 9, 9]))
    data = dataset(tmp_path)
    samples = data.load()
    assert (data.shape, data.dtype, data.num_classes, data.classes) == ((4,), torch.float32, 3, ("7", "9", "30"))
    assert samples.labels.tolist() == [0, 2, 0, 1, 2, 1, 1] and samples.inputs.dtype == torch.float32
    assert samples.inputs[:, 0].tolist() == [0, 4, 8, 100, 200, 204, 208]
    assert data.owners().number.tolist() == [0] * 4 + [1] * 3


def test_text_is_a_class_and_arrays_have_names(tmp_path):
    write_arrays(tmp_path / "a.npz", pictures=np.zeros((2, 1, 3, 3), dtype=np.uint8), kind=np.array(["wolf", "ox"]))
    data = dataset(tmp_path, inputs="pictures", targets="kind")
    assert data.classes == ("ox", "wolf") and data.load().labels.tolist() == [1, 0]
    assert data.shape == (1, 3, 3) and data.dtype == torch.float32 and data.load().inputs.dtype == torch.uint8


@pytest.mark.parametrize(
    ("targets", "shape", "dtype"),
    [
        (np.array([0.5, 1.5, 2.5]), (), torch.float32),
        (np.ones((3, 2)), (2,), torch.float32),
        (np.ones((3, 5), dtype=np.int32), (5,), torch.int64),
    ],
)
def test_other_targets_reach_the_loss_as_they_are(tmp_path, targets, shape, dtype):
    write_arrays(tmp_path / "a.npz", x=X, y=targets)
    data = dataset(tmp_path)
    assert (data.target_shape, data.target_dtype, data.num_classes, data.classes) == (shape, dtype, None, None)
    found = data.load().targets(np.arange(3))
    assert found.dtype == dtype and np.array_equal(found.numpy(), targets)


def test_whole_numbers_as_inputs_are_the_same_type_on_every_system(tmp_path):
    write_arrays(tmp_path / "a.npz", x=np.array([[1, 2]], dtype=np.int32), y=np.array([0]))
    write_arrays(tmp_path / "b.npz", x=np.array([[3, 4]], dtype=np.uint16), y=np.array([0]))
    data = dataset(tmp_path)
    assert data.dtype == torch.int64 and data.load().inputs.tolist() == [[1, 2], [3, 4]]


def test_inputs_are_read_once_and_only_when_they_are_loaded(tmp_path, monkeypatch):
    write_arrays(tmp_path / "a.npz", x=X, y=np.array([0, 1, 1]))
    read = []
    get = np.lib.npyio.NpzFile.__getitem__
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", lambda self, key: read.append(key) or get(self, key))
    data = dataset(tmp_path)
    assert read == ["y"]
    data.load()
    assert read == ["y", "x"]
    data.load()  # nothing is kept after the first time
    assert read == ["y", "x"] * 2


FIRST = {"x": X, "y": np.array([0, 1, 0])}
REFUSED = {
    "no array": (
        {"x": X, "label": np.zeros(3)},
        "it has no array 'y', but x, label; name the array in data.dataset.init_args.reader.init_args.targets",
    ),
    "no inputs": ({"y": np.zeros(3)}, "it has no array 'x', but y; name the array in"),
    "lengths": (
        {"x": X, "y": np.array([0, 1])},
        "'x' has the shape (3, 4) and 'y' (2,); the first number must be the number of samples of both",
    ),
    "shape": (
        {"x": X[:, :3], "y": np.array([0, 1, 0])},
        "each of its inputs has the shape (3,) of float32, but in the first file, ROOT/a.npz, the shape (4,) of "
        "float32; make all files alike",
    ),
    "type": (
        {"x": X.astype(np.uint8), "y": np.array([0, 1, 0])},
        "each of its inputs has the shape (4,) of uint8, but in the first file, ROOT/a.npz, the shape (4,) of float32",
    ),
    "kind of targets": (
        {"x": X, "y": np.array([0.0, 1.0, 0.0])},
        "each of its targets has the shape () of real numbers, but in the first file, ROOT/a.npz, the shape () of "
        "classes",
    ),
    "nan": (
        {"x": np.where(X == 6, np.nan, X), "y": np.array([0, 1, 0])},
        "x[1, 2] is nan; drop or replace such values",
    ),
    "beyond float32": ({"x": X * 1e300, "y": np.array([0, 1, 0])}, "x[0, 1] is inf; drop or replace such values"),
    "text as inputs": ({"x": np.array(["a", "b"]), "y": np.array([0, 1])}, "the array 'x' holds <U1; inputs must be"),
    "complex targets": ({"x": X, "y": np.ones(3, dtype=complex)}, "the array 'y' holds complex128; use numbers or"),
    "objects": ({"x": X, "y": np.array([{}, 1, 2], dtype=object)}, "it cannot be read (ValueError: Object arrays"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unusable_files_are_refused(tmp_path, case):
    write_arrays(tmp_path / "a.npz", **FIRST)
    arrays, message = REFUSED[case]
    write_arrays(tmp_path / "ward_b/train.npz", **arrays)
    assert refused(tmp_path).startswith(f"Folders: client 'ward_b': ROOT/ward_b/train.npz: {message}")


def test_an_empty_text_is_no_class(tmp_path):
    write_arrays(tmp_path / "a.npz", x=X, y=np.array(["wolf", "", "ox"]))
    assert refused(tmp_path) == "Folders: client 'a': ROOT/a.npz: y[1] is empty; drop samples without a class"


def test_truth_values_and_numbers_are_no_classes_of_one_set(tmp_path):
    write_arrays(tmp_path / "a.npz", x=X, y=np.array([True, False, True]))
    assert dataset(tmp_path).classes == ("False", "True")
    write_arrays(tmp_path / "b.npz", x=X, y=np.array([1, 0, 1]))
    assert (
        "its targets has the shape () of classes, but in the first file, ROOT/a.npz, the shape () of truth"
        in refused(tmp_path)
    )


def test_targets_that_are_not_finite_are_refused(tmp_path):
    write_arrays(tmp_path / "ward_b.npz", x=X, y=np.array([[1.0], [np.inf], [2.0]]))
    assert refused(tmp_path) == (
        "Folders: client 'ward_b': ROOT/ward_b.npz: y[1, 0] is inf; drop or replace such values"
    )


@pytest.mark.parametrize(("x", "y"), [(2**63, 0), (5, 2**64 - 1)])
def test_whole_numbers_beyond_int64_are_refused(tmp_path, x, y):
    arrays = {name: np.array([[1, value]], dtype=np.uint64) for name, value in {"x": x, "y": y}.items()}
    write_arrays(tmp_path / "ward_b.npz", **arrays)
    name, value = ("x", x) if x > y else ("y", y)
    said = f"the array {name!r} holds {value}, which is too large for int64; renumber it"
    assert refused(tmp_path) == f"Folders: client 'ward_b': ROOT/ward_b.npz: {said}"
    write_arrays(tmp_path / "ward_b.npz", x=arrays["x"] % 7, y=arrays["y"][:, 1])
    assert dataset(tmp_path).load().inputs.tolist() == [[1, x % 7]] and dataset(tmp_path).classes == (str(y),)


def test_a_damaged_file_is_refused(tmp_path):
    write_arrays(tmp_path / "a.npz", **FIRST)
    (tmp_path / "ward_b.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:100])
    assert refused(tmp_path).startswith("Folders: client 'ward_b': ROOT/ward_b.npz: it cannot be read (BadZipFile")


def test_no_training_samples_are_refused(tmp_path):
    write_arrays(tmp_path / "a.npz", **FIRST)
    write_arrays(tmp_path / "ward_b/train/1.npz", x=X[:0], y=np.array([], dtype=np.int64))
    write_arrays(tmp_path / "ward_b/test/1.npz", **FIRST)
    assert (
        refused(tmp_path)
        == "Folders: client 'ward_b': ROOT/ward_b/train: it has no samples; its files, 1.npz, are empty"
    )


def test_inputs_that_do_not_fit_into_memory_are_refused(tmp_path, monkeypatch):
    write_arrays(tmp_path / "a.npz", **FIRST)
    monkeypatch.setattr(memory, "_memory", lambda: 3 * 4 * 4 - 1)
    assert refused(tmp_path).startswith("Folders: 3 inputs need at least 0 GiB of memory, but this machine has 0 GiB.")
