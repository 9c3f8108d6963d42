"""Tests of data sets: they know their shape without files, report missing files and read torchvision's files."""

import pickle
import struct
import urllib.error
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.io
import torch
import torchvision
from PIL import Image
from torch.utils.data import TensorDataset

from lcfl.data.datasets import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    MNIST,
    SVHN,
    Datasets,
    Digits,
    FashionMNIST,
    RandomLike,
    Synthetic,
    Tensors,
)

CPU = torch.device("cpu")
DRAWS = np.random.default_rng(0)


def write_idx(path: Path, array: np.ndarray) -> None:
    """Writes the MNIST file format: two zero bytes, type 8 (uint8), number of axes, big-endian lengths, bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


def write_cifar_batch(path: Path, rows: np.ndarray, labels: list[int], key: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"data": rows, key: labels}))


@pytest.mark.parametrize("dataset_class", [MNIST, FashionMNIST])
def test_mnist_files_become_uint8_images(tmp_path, dataset_class):
    images = DRAWS.integers(0, 256, (5, 28, 28), dtype=np.uint8)
    labels = np.array([3, 1, 9, 0, 2], dtype=np.uint8)
    raw = tmp_path / dataset_class.__name__ / "raw"
    for name, part in {"train": slice(0, 3), "t10k": slice(3, 5)}.items():
        write_idx(raw / f"{name}-images-idx3-ubyte", images[part])
        write_idx(raw / f"{name}-labels-idx1-ubyte", labels[part])
    dataset = dataset_class(root=str(tmp_path))
    dataset.prepare()
    examples = dataset.load()
    assert examples.inputs.dtype == torch.uint8 and examples.inputs.shape == (5, *dataset.shape)
    assert np.array_equal(examples.inputs[:, 0], images)
    assert examples.labels.tolist() == labels.tolist() and examples.num_train == 3
    inputs, _ = examples.batch(np.array([4]), CPU)
    np.testing.assert_allclose(inputs[0, 0], (images[4] / 255 - 0.1307) / 0.3081, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dataset_class", "folder", "train_files", "test_file", "meta", "key"),
    [
        (
            CIFAR10,
            "cifar-10-batches-py",
            [f"data_batch_{k}" for k in range(1, 6)],
            "test_batch",
            "batches.meta",
            "labels",
        ),
        (CIFAR100, "cifar-100-python", ["train"], "test", "meta", "fine_labels"),
    ],
)
def test_cifar_files_become_channel_first_images(
    tmp_path, monkeypatch, dataset_class, folder, train_files, test_file, meta, key
):
    # torchvision compares MD5 sums, which these artificial files cannot match.
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: Path(path).exists())
    files = [*train_files, test_file]
    rows = DRAWS.integers(0, 256, (2 * len(files), 3072), dtype=np.uint8)
    labels = [(7 * k) % dataset_class().num_classes for k in range(len(rows))]
    for k, name in enumerate(files):
        write_cifar_batch(tmp_path / folder / name, rows[2 * k : 2 * k + 2], labels[2 * k : 2 * k + 2], key)
    names = {"label_names": [], "fine_label_names": []}
    (tmp_path / folder / meta).write_bytes(pickle.dumps(names))
    dataset = dataset_class(root=str(tmp_path))
    dataset.prepare()
    examples = dataset.load()
    # A row of CIFAR holds all red pixels, then all green ones, then all blue ones.
    assert np.array_equal(examples.inputs, rows.reshape(-1, 3, 32, 32))
    assert examples.inputs.is_contiguous() and examples.inputs.dtype == torch.uint8
    assert examples.labels.tolist() == labels and examples.num_train == 2 * len(train_files)


@pytest.mark.parametrize("split", ["byclass", "bymerge", "balanced", "letters", "digits", "mnist"])
def test_emnist_images_are_upright_and_labels_begin_at_0(tmp_path, split):
    dataset = EMNIST(split, root=str(tmp_path))
    first = 1 if split == "letters" else 0
    images = DRAWS.integers(0, 256, (5, 28, 28), dtype=np.uint8)
    labels = np.array([first, dataset.num_classes - 1 + first, 3, 4, 5], dtype=np.uint8)
    for name, part in {"train": slice(0, 3), "test": slice(3, 5)}.items():
        write_idx(tmp_path / f"EMNIST/raw/emnist-{split}-{name}-images-idx3-ubyte", images[part])
        write_idx(tmp_path / f"EMNIST/raw/emnist-{split}-{name}-labels-idx1-ubyte", labels[part])
    dataset.prepare()
    examples = dataset.load()
    # The files hold transposed images.
    assert np.array_equal(examples.inputs[:, 0], images.transpose(0, 2, 1))
    assert examples.labels.tolist() == (labels.astype(int) - first).tolist() and examples.num_train == 3
    assert examples.num_classes == dataset.num_classes


def test_emnist_has_six_splits():
    classes = {split: EMNIST(split).num_classes for split in EMNIST.NUM_CLASSES}
    assert classes == {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
    with pytest.raises(ValueError, match=r"EMNIST: got split='byclas'; allowed are byclass, bymerge, balanced"):
        EMNIST("byclas")


def test_svhn_files_become_channel_first_images(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.svhn.check_integrity", lambda path, md5=None: Path(path).exists())
    images = DRAWS.integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    labels = np.array([10, 1, 9, 10, 2], dtype=np.uint8)  # the files give the digit 0 the label 10
    for name, part in {"train": slice(0, 3), "test": slice(3, 5)}.items():
        content = {"X": images[part].transpose(2, 3, 1, 0), "y": labels[part, None]}
        scipy.io.savemat(tmp_path / f"{name}_32x32.mat", content)
    dataset = SVHN(root=str(tmp_path))
    dataset.prepare()
    examples = dataset.load()
    assert np.array_equal(examples.inputs, images)
    assert examples.inputs.is_contiguous() and examples.inputs.dtype == torch.uint8
    assert examples.labels.tolist() == [0, 1, 9, 0, 2] and examples.num_train == 3


class Part(SimpleNamespace):
    def __len__(self):
        return len(self.data)


@pytest.mark.parametrize(
    ("normalisation", "mean", "std"),
    [
        ("standard", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        ("half", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("none", (0, 0, 0), (1, 1, 1)),
    ],
)
def test_normalisation_has_the_named_mean_and_std(monkeypatch, normalisation, mean, std):
    images = DRAWS.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    dataset = CIFAR10(normalisation=normalisation)
    monkeypatch.setattr(dataset, "_parts", lambda download: [Part(data=images, targets=[1, 0])] * 2)
    inputs, _ = dataset.load().batch(np.arange(2), CPU)
    expected = ((images / 255 - mean) / std).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(inputs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dataset_class", [MNIST, FashionMNIST])
@pytest.mark.parametrize(("normalisation", "mean", "std"), [("standard", 0.1307, 0.3081), ("half", 0.5, 0.5)])
def test_grey_images_can_be_converted_to_the_shape_of_cifar(monkeypatch, dataset_class, normalisation, mean, std):
    images = torch.from_numpy(DRAWS.integers(0, 256, (2, 28, 28), dtype=np.uint8))
    dataset = dataset_class(normalisation=normalisation, like_cifar=True)
    monkeypatch.setattr(dataset, "_parts", lambda download: [Part(data=images, targets=[1, 0])] * 2)
    assert dataset.shape == (3, 32, 32)
    inputs, _ = dataset.load().batch(np.arange(2), CPU)
    expected = (np.pad(images / 255, ((0, 0), (2, 2), (2, 2))) - mean) / std
    for channel in range(3):
        np.testing.assert_allclose(inputs[:, channel], expected, rtol=1e-5, atol=1e-6)


def test_an_unknown_normalisation_is_refused():
    with pytest.raises(ValueError, match=r"CIFAR10: got normalisation='own'; allowed are standard, half, imag"):
        CIFAR10(normalisation="own")
    with pytest.raises(ValueError, match=r"MNIST: got normalisation 'imagenet' .* 1 channel.*standard, half, none"):
        MNIST(normalisation="imagenet")
    assert MNIST(normalisation="imagenet", like_cifar=True).normalisation == "imagenet"


@pytest.mark.parametrize("dataset_class", [MNIST, FashionMNIST, CIFAR10, CIFAR100])
def test_error_explains_missing_files(tmp_path, dataset_class):
    root = tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError) as caught:
        dataset_class(root=str(root)).prepare()
    message = str(caught.value)
    for words in (str(root), "data.dataset.init_args.root", "--data.dataset.init_args.download=true"):
        assert words in message
    assert f"torchvision.datasets.{dataset_class.__name__}({str(root)!r}, download=True)" in message


def test_download_command_names_the_split():
    with pytest.raises(FileNotFoundError, match=r"datasets.EMNIST\('none', split='letters', download=True\)\""):
        EMNIST("letters", root="none").prepare()
    parts = r"SVHN\('none', split='train', download=True\); .*SVHN\('none', split='test', download=True\)\""
    with pytest.raises(FileNotFoundError, match=parts):
        SVHN(root="none").prepare()


def test_error_explains_a_failed_download(monkeypatch):
    def offline(*args, **kwargs):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(torchvision.datasets, "MNIST", offline)
    with pytest.raises(FileNotFoundError, match=r"the download failed .*no route"):
        MNIST(download=True).prepare()


def test_digits_are_those_of_scikit_learn():
    examples = Digits().load()
    assert examples.inputs.shape == (1797, 1, 8, 8) and examples.num_train == 1797
    assert examples.inputs.min() == 0 and examples.inputs.max() == 1
    # The first digit is a 0, and this is its first row in scikit-learn's documentation.
    assert (examples.inputs[0, 0, 0] * 16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0] and examples.labels[0] == 0


def test_synthetic_classes_are_separable():
    dataset = Synthetic(num_classes=5, num_features=8, samples_per_class=30, test_per_class=10)
    examples = dataset.load()
    assert examples.inputs.shape == (200, 8) and examples.num_train == 150
    assert np.bincount(examples.labels[:150]).tolist() == [30] * 5
    assert np.bincount(examples.labels[150:]).tolist() == [10] * 5
    inputs, targets = examples.inputs, torch.from_numpy(examples.labels)
    means = torch.stack([inputs[:150][targets[:150] == k].mean(0) for k in range(5)])
    nearest = torch.cdist(inputs[150:], means).argmin(1)
    assert torch.equal(nearest, targets[150:])
    assert (inputs[:150] - means[targets[:150]]).std() == pytest.approx(1.0, abs=0.06)


def test_synthetic_without_separation_or_test_samples():
    examples = Synthetic(num_classes=2, num_features=4, samples_per_class=2000, test_per_class=0, separation=0).load()
    assert examples.num_train == len(examples) == 4000
    assert abs(examples.inputs.mean()) < 0.05


def test_synthetic_is_a_function_of_its_seed():
    prints = [Synthetic(seed=seed).load().fingerprint() for seed in (0, 0, 1)]
    assert prints[0] == prints[1] != prints[2]
    with pytest.raises(ValueError, match="num_classes"):
        Synthetic(num_classes=0)


@pytest.mark.parametrize("option", ["num_classes", "num_features", "samples_per_class", "test_per_class"])
def test_synthetic_samples_that_do_not_fit_into_memory_are_refused(option):
    with pytest.raises(ValueError, match=r"^Synthetic: the samples need at least .* GiB of memory, but this machine"):
        Synthetic(**{option: 2**62})


@pytest.mark.parametrize("dataset", [Digits(), Synthetic(num_classes=3), CIFAR100(), MNIST(), EMNIST("letters")])
def test_random_like_has_shape_and_classes_without_files(dataset):
    stand_in = RandomLike(dataset, num_samples=400, seed=1)
    stand_in.prepare()
    examples = stand_in.load()
    assert (stand_in.shape, stand_in.num_classes) == (dataset.shape, dataset.num_classes)
    inputs, _ = examples.batch(np.arange(10), CPU)
    assert inputs.shape == (10, *dataset.shape) and inputs.dtype == torch.float32
    assert 0 <= inputs.min() < 0.1 and 0.9 < inputs.max() <= 1
    assert (examples.num_train, len(examples)) == (400, 500)
    for part in (examples.labels[:400], examples.labels[400:]):
        counts = np.bincount(part, minlength=dataset.num_classes)
        assert counts.min() >= 1 and counts.max() - counts.min() <= 1
    with pytest.raises(ValueError, match="at least one per class"):
        RandomLike(dataset, num_samples=2)


def test_tensors_are_used_in_order():
    train = (torch.tensor([[1.0], [2.0]]), torch.tensor([0, 4]))
    test = (torch.tensor([[3.0]]), torch.tensor([1]))
    dataset = Tensors(train, test)
    assert (dataset.shape, dataset.num_classes) == ((1,), 5)
    examples = dataset.load()
    assert examples.inputs.tolist() == [[1.0], [2.0], [3.0]] and examples.labels.tolist() == [0, 4, 1]
    assert examples.num_train == 2
    assert Tensors(train, num_classes=9).num_classes == 9


def test_labels_that_count_no_classes_are_refused():
    labels = torch.tensor([0, 10**9])
    with pytest.raises(ValueError, match=r"Tensors: got the label 1000000000 among 2 samples; .* renumber them"):
        Tensors((torch.zeros(2, 1), labels))
    assert Tensors((torch.zeros(2, 1), labels), num_classes=10**9 + 1).num_classes == 10**9 + 1


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ((torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)), r"each input \(1,\)"),
        ((torch.zeros(2, 1), torch.zeros(1, dtype=torch.int64)), "as many inputs as targets"),
        ((torch.zeros(1, 1).long(), torch.zeros(1, dtype=torch.int64)), "int64"),
        (torch.zeros(3, 1), r"test must be a pair \(inputs, targets\), got Tensor"),
        ((torch.zeros(3, 1), torch.zeros(3, 1)), r"targets of train and test must be alike, got .* \(3, 1\)"),
        ((torch.zeros(3, 1), torch.tensor(1)), r"inputs \[S, ...\] and targets \[S, ...\], got shapes .* \(\)"),
        (
            (torch.zeros(2, 1), ["cat", "dog"]),
            "test targets: list cannot become a tensor: it is text; number its values",
        ),
        ((torch.zeros(2, 1), np.array(["a", "b"], dtype=object)), "test targets: ndarray cannot .* it is text; number"),
        (("text", [0]), "test inputs: an input must be a tensor, a numpy array or a list of numbers, got str"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(test, words):
    with pytest.raises(ValueError, match=words):
        Tensors((torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64)), test)


def test_tensors_accept_arrays_and_lists_and_convert_floats_to_float32():
    dataset = Tensors((np.array([[0.5], [2.0]]), np.array([1, 0], dtype=np.uint8)), (torch.ones(1, 1).double(), [1]))
    inputs, targets = dataset.load().batch(np.array([0, 2]), CPU)
    assert inputs.tolist() == [[0.5], [1.0]] and inputs.dtype == dataset.dtype == torch.float32
    assert targets.tolist() == [1, 1] and dataset.shape == (1,)
    with pytest.raises(ValueError, match=r"one integer .* of torch.float32; convert labels with \.long\(\)"):
        Tensors((torch.zeros(2, 1), torch.tensor([0.0, 1.0])), num_classes=2)
    with pytest.raises(ValueError, match=r"one integer per sample, got shape \(2,\) of bool; convert them with \.long"):
        Tensors((torch.zeros(2, 1), torch.tensor([False, True]))).load()


def test_uint8_tensors_are_scaled_and_other_integers_keep_their_type():
    for given, used, value in ((torch.uint8, torch.float32, 1.0), (torch.int64, torch.int64, 255)):
        dataset = Tensors((torch.full((2, 3), 255, dtype=given), torch.tensor([0, 1])))
        inputs, _ = dataset.load().batch(np.array([0]), CPU)
        assert inputs.tolist() == [[value] * 3] and inputs.dtype == dataset.dtype == used


@pytest.mark.parametrize(
    ("item", "shape", "dtype"),
    [
        (torch.zeros(2, 3), (2, 3), torch.float32),
        (torch.zeros(2, 3).double(), (2, 3), torch.float32),
        (np.zeros((2, 3)), (2, 3), torch.float32),
        (np.zeros((2, 3), dtype=np.uint8), (2, 3), torch.float32),
        ([[1, 2, 3], [4, 5, 6]], (2, 3), torch.int64),
        ([0.5, 1.5], (2,), torch.float32),
        (0.5, (), torch.float32),
    ],
    ids=str,
)
def test_datasets_know_shape_and_type_of_items(item, shape, dtype):
    dataset = Datasets([(item, label) for label in (0, 1, 1, 0)], num_classes=2)
    assert (dataset.shape, dataset.dtype, dataset.num_classes) == (shape, dtype, 2)
    examples = dataset.load()
    inputs, targets = examples.batch(np.arange(4), CPU)
    assert (inputs.shape, inputs.dtype, targets.tolist()) == ((4, *shape), dtype, [0, 1, 1, 0])


def test_unusable_first_item_is_refused_at_once():
    with pytest.raises(ValueError, match="PIL image"):
        Datasets([(Image.new("L", (2, 2)), 0)], num_classes=2)
    with pytest.raises(ValueError, match="map-style"):
        Datasets(TensorDataset(torch.zeros(1), torch.zeros(1)), num_classes=2, test=iter([]))


def test_reading_the_first_item_does_not_advance_global_generators():
    class Random(TensorDataset):
        def __getitem__(self, index):
            return torch.rand(2), 0

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert Datasets(Random(torch.zeros(3)), num_classes=1).shape == (2,)
    assert torch.equal(torch.rand(1), expected)


def test_random_like_of_integers_is_zero_or_one():
    tokens = Tensors((torch.tensor([[5, 6, 7], [8, 9, 9]]), torch.tensor([0, 1])))
    inputs, targets = RandomLike(tokens, num_samples=4).load().batch(np.arange(4), CPU)
    assert inputs.dtype == torch.int64 and inputs.shape == (4, 3) and set(inputs.unique().tolist()) == {0, 1}
    assert targets.tolist() == [0, 1, 0, 1]
