"""The image data sets of torchvision."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from lcfl.data.augmentation import Augmentation
from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.samples import Samples, TensorSamples

__all__ = ["CIFAR10", "CIFAR100", "EMNIST", "MNIST", "SVHN", "FashionMNIST", "TorchvisionImages"]

# (mean, std) per channel of inputs in 0..1. In addition, each data set has its own values, "standard".
NORMALISATIONS = {"half": ((0.5,), (0.5,)), "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}

Normalisation = Literal["standard", "half", "imagenet", "none"]


class TorchvisionImages(FederatedDataset):
    """Base class of the torchvision data sets, whose raw uint8 images are read all at once, never one by one.

    A subclass has the name of its torchvision class and defines its constants.

    Args:
        root: folder of torchvision's files.
        download: whether to download missing files.
        normalisation: mean and standard deviation per channel by which inputs in 0..1 are normalised. ``standard`` uses
            the usual values of the data set (those of PACFL, therefore FedClust, and NIID-Bench). ``half`` uses 0.5 and
            0.5, which gives -1..1 (PFLlib). ``imagenet`` uses ImageNet's values and is for colour images (LG-FedAvg).
            ``none`` does not normalise.
        augmentation: changes the images of training batches, e.g. ``CropAndFlip``.

    Raises:
        ValueError: if the normalisation is unknown, or is ``imagenet`` for grey images.
    """

    _mean: ClassVar[Sequence[float]]
    _std: ClassVar[Sequence[float]]
    _prepared: tuple[Any, Any] | None = None  # torchvision's two parts, which verify their files whenever they are made

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        normalisation: Normalisation = "standard",
        augmentation: Augmentation | None = None,
    ) -> None:
        self.root = root
        self.download = download
        self.normalisation = normalisation
        self.augmentation = augmentation
        self._check_normalisation()

    def prepare(self) -> None:
        """Downloads the files if ``download`` is set. Reads both parts for `load`, so a damaged file is found here."""
        self._prepared = self._parts(self.download)

    def load(self) -> Samples:
        """Returns the training images, then the official test images, in torchvision's order."""
        train, test = self._prepared or self._parts(download=False)
        self._prepared = None
        inputs = torch.cat([self._images(part) for part in (train, test)])
        targets = np.concatenate([self._labels(part) for part in (train, test)])
        mean, std = self._mean_and_std()
        return TensorSamples(inputs, targets, len(train), self.num_classes, mean, std, self.augmentation)

    def _parts(self, download: bool) -> tuple[Any, Any]:
        import torchvision.datasets  # type: ignore[import-untyped,unused-ignore]

        name = type(self).__name__
        make = getattr(torchvision.datasets, name)
        train, test = (self._options(is_train) for is_train in (True, False))
        try:
            return make(self.root, **train, download=download), make(self.root, **test, download=download)
        # torchvision raises RuntimeError for missing or damaged files and OSError if the network fails.
        except (RuntimeError, OSError) as error:
            raise FileNotFoundError(
                f"{name}: no complete copy under {self.root!r} (data.dataset.init_args.root) and "
                f"{'the download failed' if download else 'download is false'} ({error}). "
                "Set --data.dataset.init_args.download=true, point data.dataset.init_args.root to a folder that has "
                f'the data set, or download it with: python -c "{self._command()}"'
            ) from error

    def _options(self, train: bool) -> dict[str, Any]:
        """Returns the arguments with which torchvision's class gives the training or the test part."""
        return {"train": train}

    def _images(self, part: Any) -> Tensor:
        """Returns the images [S, C, H, W] as uint8."""
        return torch.as_tensor(part.data).permute(0, 3, 1, 2)

    def _labels(self, part: Any) -> NDArray[Any]:
        return np.asarray(part.targets)

    def _command(self) -> str:
        """Returns Python code that downloads both parts with torchvision alone, e.g. on another machine."""
        calls = []
        for train in (True, False):
            words = [f"{name}={value!r}" for name, value in self._options(train).items() if name != "train"]
            arguments = ", ".join([repr(self.root), *words, "download=True"])
            calls.append(f"torchvision.datasets.{type(self).__name__}({arguments})")
        return "; ".join(["import torchvision", *dict.fromkeys(calls)])

    def _mean_and_std(self) -> tuple[Sequence[float] | None, Sequence[float] | None]:
        """Returns mean and standard deviation per channel."""
        if self.normalisation == "none":
            return None, None
        mean, std = NORMALISATIONS.get(self.normalisation, (self._mean, self._std))
        repeats = self.shape[0] // len(mean)
        return tuple(mean) * repeats, tuple(std) * repeats

    def _check_normalisation(self) -> None:
        allowed = ["standard", "half", *(["imagenet"] if self.shape[0] == 3 else []), "none"]
        if self.normalisation not in allowed:
            raise ValueError(
                f"{type(self).__name__}: got normalisation {self.normalisation!r} for images with {self.shape[0]} "
                f"channel(s); data.dataset.init_args.normalisation may be {', '.join(allowed)}"
            )


class CIFAR10(TorchvisionImages):
    """CIFAR-10: 50,000 + 10,000 photographs of 10 classes, 3 x 32 x 32."""

    shape, num_classes = (3, 32, 32), 10
    _mean, _std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class CIFAR100(TorchvisionImages):
    """CIFAR-100: 50,000 + 10,000 photographs of 100 classes, 3 x 32 x 32."""

    shape, num_classes = (3, 32, 32), 100
    _mean, _std = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)


class SVHN(TorchvisionImages):
    """SVHN: 73,257 + 26,032 photographs of digits in house numbers, 3 x 32 x 32.

    Its 531,131 extra images are not used.
    """

    shape, num_classes = (3, 32, 32), 10
    _mean, _std = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)

    def _options(self, train: bool) -> dict[str, Any]:
        return {"split": "train" if train else "test"}

    def _images(self, part: Any) -> Tensor:
        return torch.from_numpy(part.data)

    def _labels(self, part: Any) -> NDArray[Any]:
        return np.asarray(part.labels)


class MNIST(TorchvisionImages):
    """MNIST: 60,000 + 10,000 handwritten digits, 1 x 28 x 28.

    Args:
        root: folder of torchvision's files.
        download: whether to download missing files.
        normalisation: ``standard``, ``half`` or ``none``; with ``like_cifar`` also ``imagenet``.
        augmentation: changes the images of training batches.
        like_cifar: whether to pad the images with zeros to 32 x 32 pixels and to repeat them in three channels, as
            PACFL does if networks must be equal. FedClust counts the bytes for a Fashion-MNIST in this form.
    """

    shape, num_classes = (1, 28, 28), 10
    _mean, _std = (0.1307,), (0.3081,)

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        normalisation: Normalisation = "standard",
        augmentation: Augmentation | None = None,
        like_cifar: bool = False,
    ) -> None:
        self.like_cifar = like_cifar
        if like_cifar:
            self.shape = (3, 32, 32)
        super().__init__(root, download, normalisation, augmentation)

    def _images(self, part: Any) -> Tensor:
        images = part.data.unsqueeze(1)
        return functional.pad(images, [2] * 4).expand(-1, 3, -1, -1) if self.like_cifar else images


class FashionMNIST(MNIST):
    """Fashion-MNIST: 60,000 + 10,000 pieces of clothing, 1 x 28 x 28.

    Arguments and normalisation are those of `MNIST`, as in PACFL.
    """


class EMNIST(MNIST):
    """EMNIST: handwritten letters and digits, 1 x 28 x 28, in six splits, normalised like `MNIST`, as in PACFL.

    The splits are:

    - ``byclass``: 697,932 + 116,323 images of 62 classes
    - ``bymerge``: the same images with 15 capital letters merged into small letters, 47 classes
    - ``balanced``: 112,800 + 18,800 images of these 47 classes
    - ``letters``: 124,800 + 20,800 images of 26 classes, capital and small letters together
    - ``digits``: 240,000 + 40,000 images of 10 classes
    - ``mnist``: 60,000 + 10,000 images of 10 classes

    The files hold every image transposed and count the letters from 1. This class turns the images upright and makes
    labels begin at 0.

    Args:
        split: one of the six splits.
        root: folder of torchvision's files.
        download: whether to download missing files; one archive of 560 MB has all splits.
        normalisation: ``standard``, ``half`` or ``none``; with ``like_cifar`` also ``imagenet``.
        augmentation: changes the images of training batches.
        like_cifar: as in `MNIST`.

    Raises:
        ValueError: if the split is unknown.
    """

    NUM_CLASSES: ClassVar = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}

    def __init__(
        self,
        split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"],
        root: str = "data",
        download: bool = False,
        normalisation: Normalisation = "standard",
        augmentation: Augmentation | None = None,
        like_cifar: bool = False,
    ) -> None:
        self.split, self.num_classes = split, self.NUM_CLASSES[split]
        super().__init__(root, download, normalisation, augmentation, like_cifar)

    def _options(self, train: bool) -> dict[str, Any]:
        return {"split": self.split, "train": train}

    def _images(self, part: Any) -> Tensor:
        return super()._images(part).transpose(2, 3)

    def _labels(self, part: Any) -> NDArray[Any]:
        return super()._labels(part) - (self.split == "letters")
