"""Data sets: what is known of them without reading a file, how they get here, and how they become ``Examples``."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lcfl import rng
from lcfl.data.examples import (
    DatasetExamples,
    Examples,
    TensorExamples,
    as_input,
    check_map_style,
    network_dtype,
    read_item,
)

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "Datasets",
    "Digits",
    "FashionMNIST",
    "FederatedDataset",
    "RandomLike",
    "Synthetic",
    "Tensors",
    "TorchvisionImages",
]


class FederatedDataset(ABC):
    """A source of ``Examples`` that knows its shape and classes before a file is read.

    Attributes:
        shape: of one input, images as (channels, height, width).
        num_classes: number of labels.
        dtype: type of the inputs that a network gets.
    """

    shape: tuple[int, ...]
    num_classes: int
    dtype: torch.dtype = torch.float32

    def prepare(self) -> None:  # noqa: B027 - most sources have nothing to prepare
        """Downloads, or verifies that the files are there; called once, on one process. Does nothing by default.

        Raises:
            FileNotFoundError: files are missing; the message says where and how to get them.
        """

    @abstractmethod
    def load(self) -> Examples:
        """Reads everything; called on every process after ``prepare``."""


class Digits(FederatedDataset):
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, scaled to 0..1. Needs no file, has no official test."""

    shape, num_classes = (1, 8, 8), 10

    def load(self) -> Examples:
        """All images are training images."""
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]

        images, targets = load_digits(return_X_y=True)
        # Pixels count 0 to 16, which float32 holds exactly after division by a power of two.
        inputs = torch.from_numpy(images.astype(np.float32) / 16).reshape(-1, *self.shape)
        return TensorExamples(inputs, targets, len(targets), self.num_classes)


class Synthetic(FederatedDataset):
    """One Gaussian blob per class, x = centre_k + noise, for tests and first steps.

    Args:
        num_classes: number of blobs.
        num_features: length of one input.
        samples_per_class: training inputs of each class.
        test_per_class: official test inputs of each class, may be 0.
        separation: standard deviation of the centres' coordinates in units of the noise's; two centres are about
            separation * sqrt(2 num_features) apart.
        seed: of centres and noise.
    """

    def __init__(
        self,
        num_classes: int = 8,
        num_features: int = 16,
        samples_per_class: int = 200,
        test_per_class: int = 50,
        separation: float = 3.0,
        seed: int = 0,
    ) -> None:
        if min(num_classes, num_features, samples_per_class) < 1 or test_per_class < 0 or not separation >= 0:
            raise ValueError(
                "Synthetic: num_classes, num_features and samples_per_class must be at least 1, test_per_class and "
                f"separation at least 0; got {num_classes}, {num_features}, {samples_per_class}, {test_per_class} "
                f"and {separation}"
            )
        self.shape, self.num_classes = (num_features,), num_classes
        self._per_class = (samples_per_class, test_per_class)
        self._separation, self._seed = separation, seed

    def load(self) -> Examples:
        """Classes in order, within the training and within the test part."""
        centres = rng.generator(self._seed, "blob centres").normal(0, self._separation, (self.num_classes, *self.shape))
        targets = np.concatenate([np.repeat(np.arange(self.num_classes), count) for count in self._per_class])
        noise = rng.generator(self._seed, "blob noise").normal(size=(len(targets), *self.shape))
        inputs = torch.from_numpy((centres[targets] + noise).astype(np.float32))
        return TensorExamples(inputs, targets, self.num_classes * self._per_class[0], self.num_classes)


class TorchvisionImages(FederatedDataset):
    """What the torchvision data sets share: raw uint8 images read whole, never image by image.

    A subclass is named after its torchvision class and gives its constants.

    Args:
        root: folder of torchvision's files.
        download: fetch what is missing.
    """

    _mean: ClassVar[Sequence[float]]
    _std: ClassVar[Sequence[float]]

    def __init__(self, root: str = "data", download: bool = False) -> None:
        self.root = root
        self.download = download

    def prepare(self) -> None:
        """Downloads if ``download`` is set; either way both parts are read once, so that a damaged file shows here."""
        self._parts(self.download)

    def load(self) -> Examples:
        """Training images, then official test images, in torchvision's order."""
        train, test = self._parts(download=False)
        inputs = torch.cat([_channels_first(part.data) for part in (train, test)])
        targets = np.concatenate([np.asarray(part.targets) for part in (train, test)])
        return TensorExamples(inputs, targets, len(train), self.num_classes, self._mean, self._std)

    def _parts(self, download: bool) -> tuple[Any, Any]:
        import torchvision.datasets  # type: ignore[import-untyped,unused-ignore]

        name = type(self).__name__
        make = getattr(torchvision.datasets, name)
        try:
            return make(self.root, train=True, download=download), make(self.root, train=False, download=download)
        # torchvision raises RuntimeError for missing or damaged files, OSError where the network fails.
        except (RuntimeError, OSError) as error:
            command = f"import torchvision; torchvision.datasets.{name}({self.root!r}, download=True)"
            raise FileNotFoundError(
                f"{name}: no complete copy under {self.root!r} (data.dataset.init_args.root) and "
                f"{'the download failed' if download else 'download is false'} ({error}). "
                "Set --data.dataset.init_args.download=true, point data.dataset.init_args.root to a folder that has "
                f'it, or fetch it with: python -c "{command}"'
            ) from error


class MNIST(TorchvisionImages):
    """60,000 + 10,000 handwritten digits, 1 x 28 x 28."""

    shape, num_classes = (1, 28, 28), 10
    _mean, _std = (0.1307,), (0.3081,)


class FashionMNIST(TorchvisionImages):
    """60,000 + 10,000 pieces of clothing, 1 x 28 x 28; normalised like MNIST, as pacfl does."""

    shape, num_classes = (1, 28, 28), 10
    _mean, _std = (0.1307,), (0.3081,)


class CIFAR10(TorchvisionImages):
    """50,000 + 10,000 photographs of 10 classes, 3 x 32 x 32."""

    shape, num_classes = (3, 32, 32), 10
    _mean, _std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class CIFAR100(TorchvisionImages):
    """50,000 + 10,000 photographs of 100 classes, 3 x 32 x 32."""

    shape, num_classes = (3, 32, 32), 100
    _mean, _std = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)


class Tensors(FederatedDataset):
    """One's own data as tensors or numpy arrays, from Python.

    Args:
        train: inputs [S, ...] and integer labels [S]; uint8 inputs are scaled to 0..1, floating ones become float32,
            integers of other types stay what they are.
        test: the official test images in the same form, if there are any.
        num_classes: number of labels; None: the largest label + 1.

    Raises:
        ValueError: no pairs, no samples, or inputs and labels that do not fit together.
    """

    def __init__(
        self,
        train: tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]],
        test: tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]] | None = None,
        num_classes: int | None = None,
    ) -> None:
        self._parts = [_pair_of_tensors("train", train)]
        if test is not None:
            self._parts.append(_pair_of_tensors("test", test))
        first, _ = self._parts[0]
        self.shape, self.dtype = tuple(first.shape[1:]), network_dtype(first)
        for inputs, targets in self._parts:
            if len(inputs) != len(targets) or tuple(inputs.shape[1:]) != self.shape or inputs.dtype != first.dtype:
                raise ValueError(
                    f"Tensors: expected as many inputs as labels, each input {self.shape} of {first.dtype}; got inputs "
                    f"{tuple(inputs.shape)} of {inputs.dtype} and {len(targets)} labels"
                )
        labels = torch.cat([targets for _, targets in self._parts])
        if num_classes is None and len(labels) == 0:
            raise ValueError("Tensors: got no samples; give at least one training sample")
        self.num_classes = int(labels.max()) + 1 if num_classes is None else num_classes

    def load(self) -> Examples:
        """Training tensors, then test tensors."""
        inputs, targets = (torch.cat(each) for each in zip(*self._parts, strict=True))
        return TensorExamples(inputs, targets, len(self._parts[0][1]), self.num_classes)


class Datasets(FederatedDataset):
    """One's own map-style data sets of (input, label) pairs, from Python or as class paths in YAML.

    An input is a tensor, a numpy array, a number or a list of numbers, all of one shape and type: floating ones become
    float32, uint8 ones are scaled to 0..1, integers of other types stay what they are. A label is one integer.

    Args:
        train: the training images.
        num_classes: number of labels.
        test: the official test images, if there are any.

    Raises:
        ValueError: a data set that cannot be read by position, or a first item that is unusable.
    """

    # Bare, because jsonargparse accepts no init_args for subclasses of Dataset[Any].
    def __init__(self, train: Dataset, num_classes: int, test: Dataset | None = None) -> None:  # type: ignore[type-arg]
        for part in (train,) if test is None else (train, test):
            check_map_style(part)
        self.train, self.test, self.num_classes = train, test, num_classes
        with rng.scope(0, "read items"):
            first, _ = read_item(train, "train", 0)
        self.shape, self.dtype = tuple(first.shape), network_dtype(first)

    def load(self) -> Examples:
        """The data sets as they are, behind one index."""
        return DatasetExamples(self.train, self.test, self.num_classes)


class RandomLike(FederatedDataset):
    """Random inputs with the shape and classes of another data set, none of whose files is read.

    For ``fast_dev_run``: a run of every code path without a download. Labels are balanced, and carry no meaning.
    Where inputs are integers they are all 0, the one number that every vocabulary has.

    Args:
        dataset: the data set to stand in for.
        num_samples: how many training inputs; there are a quarter as many official test inputs, at least one per
            class.
        seed: of the inputs.
    """

    def __init__(self, dataset: FederatedDataset, num_samples: int, seed: int = 0) -> None:
        if num_samples < dataset.num_classes:
            raise ValueError(
                f"RandomLike: num_samples must be at least one per class ({dataset.num_classes}), got {num_samples}"
            )
        self.shape, self.num_classes, self.dtype = dataset.shape, dataset.num_classes, dataset.dtype
        self._num_samples, self._seed = num_samples, seed

    def load(self) -> Examples:
        """Labels 0, 1, ..., C - 1, 0, 1, ... in both parts."""
        num_test = max(self.num_classes, self._num_samples // 4)
        targets = np.concatenate([np.arange(count) % self.num_classes for count in (self._num_samples, num_test)])
        size = (len(targets), *self.shape)
        if self.dtype.is_floating_point:
            pixels = rng.generator(self._seed, "random inputs").integers(0, 256, size, dtype=np.uint8)
            inputs = torch.from_numpy(pixels)
        else:
            inputs = torch.zeros(size, dtype=self.dtype)
        return TensorExamples(inputs, targets, self._num_samples, self.num_classes)


def _pair_of_tensors(name: str, pair: Any) -> tuple[Tensor, Tensor]:
    """Inputs and labels as tensors."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise ValueError(f"Tensors: {name} must be a pair (inputs, labels), got {type(pair).__name__}")
    inputs, labels = as_input(pair[0], f"Tensors: {name} inputs"), as_input(pair[1], f"Tensors: {name} labels")
    if inputs.ndim == 0 or labels.ndim != 1:
        raise ValueError(
            f"Tensors: {name} must be inputs [S, ...] and labels [S], got shapes {tuple(inputs.shape)} and "
            f"{tuple(labels.shape)}"
        )
    return inputs, labels


def _channels_first(images: NDArray[np.uint8] | Tensor) -> Tensor:
    """[S, C, H, W] of torchvision's raw images: [S, H, W] tensors (MNIST) or [S, H, W, C] arrays (CIFAR)."""
    pixels = torch.as_tensor(images)
    return pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
