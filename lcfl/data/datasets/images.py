"""torchvision's sets of images."""

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

# (mean, std) per channel of inputs in 0..1; beside these there is each data set's own, "standard".
NORMALISATIONS = {"half": ((0.5,), (0.5,)), "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}

Normalisation = Literal["standard", "half", "imagenet", "none"]


class TorchvisionImages(FederatedDataset):
    """What the torchvision data sets share: raw uint8 images read whole, never image by image.

    A subclass is named after its torchvision class and gives its constants.

    Args:
        root: folder of torchvision's files.
        download: fetch what is missing.
        normalisation: mean and standard deviation per channel that inputs in 0..1 are normalised by: ``standard``,
            the data set's usual ones (PACFL's, so FedClust's, and NIID-Bench's); ``half``, 0.5 and 0.5, which gives
            -1..1 (PFLlib's); ``imagenet``, for colour images (LG-FedAvg's); ``none``.
        augmentation: changes the images of training batches, e.g. ``CropAndFlip``.

    Raises:
        ValueError: an unknown normalisation, or ImageNet's for grey images.
    """

    _mean: ClassVar[Sequence[float]]
    _std: ClassVar[Sequence[float]]

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
        """Downloads if ``download`` is set; either way both parts are read once, so that a damaged file shows here."""
        self._parts(self.download)

    def load(self) -> Samples:
        """Training images, then official test images, in torchvision's order."""
        train, test = self._parts(download=False)
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
        # torchvision raises RuntimeError for missing or damaged files, OSError where the network fails.
        except (RuntimeError, OSError) as error:
            raise FileNotFoundError(
                f"{name}: no complete copy under {self.root!r} (data.dataset.init_args.root) and "
                f"{'the download failed' if download else 'download is false'} ({error}). "
                "Set --data.dataset.init_args.download=true, point data.dataset.init_args.root to a folder that has "
                f'it, or fetch it with: python -c "{self._command()}"'
            ) from error

    def _options(self, train: bool) -> dict[str, Any]:
        """How torchvision's class is asked for the training or the test part."""
        return {"train": train}

    def _images(self, part: Any) -> Tensor:
        """[S, C, H, W] uint8."""
        return torch.as_tensor(part.data).permute(0, 3, 1, 2)

    def _labels(self, part: Any) -> NDArray[Any]:
        return np.asarray(part.targets)

    def _command(self) -> str:
        """What downloads both parts with torchvision alone, e.g. on another machine."""
        calls = []
        for train in (True, False):
            words = [f"{name}={value!r}" for name, value in self._options(train).items() if name != "train"]
            arguments = ", ".join([repr(self.root), *words, "download=True"])
            calls.append(f"torchvision.datasets.{type(self).__name__}({arguments})")
        return "; ".join(["import torchvision", *dict.fromkeys(calls)])

    def _mean_and_std(self) -> tuple[Sequence[float] | None, Sequence[float] | None]:
        """Per channel."""
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
    """50,000 + 10,000 photographs of 10 classes, 3 x 32 x 32."""

    shape, num_classes = (3, 32, 32), 10
    _mean, _std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class CIFAR100(TorchvisionImages):
    """50,000 + 10,000 photographs of 100 classes, 3 x 32 x 32."""

    shape, num_classes = (3, 32, 32), 100
    _mean, _std = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)


class SVHN(TorchvisionImages):
    """73,257 + 26,032 photographs of house numbers' digits, 3 x 32 x 32; its 531,131 extra images are left out."""

    shape, num_classes = (3, 32, 32), 10
    _mean, _std = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)

    def _options(self, train: bool) -> dict[str, Any]:
        return {"split": "train" if train else "test"}

    def _images(self, part: Any) -> Tensor:
        return torch.from_numpy(part.data)

    def _labels(self, part: Any) -> NDArray[Any]:
        return np.asarray(part.labels)


class MNIST(TorchvisionImages):
    """60,000 + 10,000 handwritten digits, 1 x 28 x 28.

    Args:
        root: folder of torchvision's files.
        download: fetch what is missing.
        normalisation: ``standard``, ``half`` or ``none``; with `like_cifar` also ``imagenet``.
        augmentation: changes the images of training batches.
        like_cifar: pad the images with zeros to 32 x 32 pixels and repeat them to three channels, as PACFL does
            where networks must be equal. FedClust counts the bytes of such a Fashion-MNIST.
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
    """60,000 + 10,000 pieces of clothing, 1 x 28 x 28; the arguments and the normalisation of ``MNIST``, as PACFL."""


class EMNIST(MNIST):
    """Handwritten letters and digits, 1 x 28 x 28, in six splits; normalised like ``MNIST``, as PACFL does.

    byclass: 697,932 + 116,323 images of 62 classes; bymerge: the same with 15 capital letters merged into small ones,
    47 classes; balanced: 112,800 + 18,800 of these 47; letters: 124,800 + 20,800 of 26, capital and small together;
    digits: 240,000 + 40,000 of 10; mnist: 60,000 + 10,000 of 10. The files hold every image transposed and count
    the letters from 1: here images stand upright and labels begin at 0.

    Args:
        split: which of the six.
        root: folder of torchvision's files.
        download: fetch what is missing; one archive of 560 MB has all splits.
        normalisation: ``standard``, ``half`` or ``none``; with `like_cifar` also ``imagenet``.
        augmentation: changes the images of training batches.
        like_cifar: as in ``MNIST``.

    Raises:
        ValueError: an unknown split.
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
        if split not in self.NUM_CLASSES:
            raise ValueError(
                f"EMNIST: got split {split!r}; data.dataset.init_args.split may be {', '.join(self.NUM_CLASSES)}"
            )
        self.split, self.num_classes = split, self.NUM_CLASSES[split]
        super().__init__(root, download, normalisation, augmentation, like_cifar)

    def _options(self, train: bool) -> dict[str, Any]:
        return {"split": self.split, "train": train}

    def _images(self, part: Any) -> Tensor:
        return super()._images(part).transpose(2, 3)

    def _labels(self, part: Any) -> NDArray[Any]:
        return super()._labels(part) - (self.split == "letters")
