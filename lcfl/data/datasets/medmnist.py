"""The medical images of MedMNIST, read from its files. Shapes: S samples in all, L labels of a sample."""

import zipfile
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lcfl.core.validation import check_choice
from lcfl.data.augmentation import Augmentation
from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.samples import Samples, TensorSamples

__all__ = ["MedMNIST"]


class MedMNIST(FederatedDataset):
    """MedMNIST: sets of medical images of one size, grey or coloured, also in three dimensions.

    The images have no owners, so a partition deals them out. The targets of ``chestmnist`` are 14 labels that are each
    0 or 1, as float32, for a loss such as ``BCEWithLogitsLoss``. Those of all other sets are classes; of the ordered
    grades of ``retinamnist``, too.

    Args:
        flag: the set, as MedMNIST calls it: ``pathmnist``, ``bloodmnist``, ``organmnist3d``, ...
        root: folder of the file ``<flag>.npz``, or ``<flag>_<size>.npz`` for sizes other than 28.
        size: height and width of an image: 28, 64, 128 or 224; 28 or 64 in three dimensions.
        val: what the official validation images are: ``train`` for training images, because every client holds out
            validation images of its own, or ``unused``.
        normalisation: ``half`` for (x - 0.5) / 0.5, which gives -1..1, as MedMNIST's own examples, or ``none`` for
            0..1.
        augmentation: changes the images of training batches, e.g. ``CropAndFlip``.

    Raises:
        ValueError: if an argument is not allowed, or the file does not hold what this set must have.
    """

    # Classes (of chestmnist, labels) and channels.
    SETS: ClassVar = {
        "pathmnist": (9, 3),
        "chestmnist": (14, 1),
        "dermamnist": (7, 3),
        "octmnist": (4, 1),
        "pneumoniamnist": (2, 1),
        "retinamnist": (5, 3),
        "breastmnist": (2, 1),
        "bloodmnist": (8, 3),
        "tissuemnist": (8, 1),
        "organamnist": (11, 1),
        "organcmnist": (11, 1),
        "organsmnist": (11, 1),
        "organmnist3d": (11, 1),
        "nodulemnist3d": (2, 1),
        "adrenalmnist3d": (2, 1),
        "fracturemnist3d": (3, 1),
        "vesselmnist3d": (2, 1),
        "synapsemnist3d": (2, 1),
    }

    def __init__(
        self,
        flag: str,
        root: str = "data",
        size: int = 28,
        val: Literal["train", "unused"] = "train",
        normalisation: Literal["half", "none"] = "half",
        augmentation: Augmentation | None = None,
    ) -> None:
        check_choice("MedMNIST: got flag=", flag, self.SETS)
        is_volume = flag.endswith("3d")
        check_choice("MedMNIST: got size=", size, (28, 64) if is_volume else (28, 64, 128, 224))
        if is_volume and augmentation is not None:
            raise ValueError(f"MedMNIST: {flag} has volumes, and an augmentation changes images; leave it out")
        self.flag, self.root, self.size, self.val = flag, root, size, val
        self.normalisation, self.augmentation = normalisation, augmentation
        self._number, channels = self.SETS[flag]
        self.shape = (channels, *[size] * (3 if is_volume else 2))
        self.num_classes = self._number
        if flag == "chestmnist":
            self.num_classes, self.target_shape, self.target_dtype = None, (self._number,), torch.float32

    @property
    def _path(self) -> Path:
        return Path(self.root, f"{self.flag}.npz" if self.size == 28 else f"{self.flag}_{self.size}.npz")

    def prepare(self) -> None:
        """Verifies that the file exists and has images and labels of all three parts."""
        if not self._path.is_file():
            raise FileNotFoundError(
                f"MedMNIST: there is no file {str(self._path)!r}. Take it from MedMNIST's page on Zenodo, or let the "
                f"package medmnist download all sets (python -m medmnist download --size={self.size} "
                "--root=FOLDER), and set data.dataset.init_args.root to its folder."
            )
        with self._opened() as file:
            self._check_keys(file)

    def load(self) -> Samples:
        """Returns the training images, with `val` ``train`` the validation images, then the test images."""
        parts = ["train", "val", "test"] if self.val == "train" else ["train", "test"]
        images, labels = [], []
        with self._opened() as file:
            self._check_keys(file)
            for part in parts:
                images.append(self._images(file, part))
                labels.append(self._labels(file, part, len(images[-1])))
        num_train = sum(map(len, labels[:-1]))
        targets = np.concatenate(labels)
        half = [0.5] * self.shape[0] if self.normalisation == "half" else None
        inputs = torch.from_numpy(np.concatenate(images))
        return TensorSamples(inputs, targets, num_train, self.num_classes, half, half, self.augmentation)

    def _opened(self) -> Any:
        try:
            return np.load(self._path)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"MedMNIST: {str(self._path)!r} cannot be read ({error}); download it again") from error

    def _check_keys(self, file: Any) -> None:
        missing = [f"{part}_{what}" for part in ("train", "val", "test") for what in ("images", "labels")]
        missing = [key for key in missing if key not in file]
        if missing:
            raise ValueError(f"MedMNIST: {str(self._path)!r} has no {', '.join(missing)}; is it a file of MedMNIST?")

    def _images(self, file: Any, part: str) -> NDArray[np.uint8]:
        """Returns the images [n, channels, height, width], or volumes with depth as the second axis."""
        images = self._array(file, f"{part}_images")
        stored = (*self.shape[1:], *self.shape[:1]) if self.shape[0] == 3 else self.shape[1:]
        if images.dtype != np.uint8 or images.shape[1:] != stored:
            raise ValueError(
                f"MedMNIST: {part}_images in {str(self._path)!r} must be uint8 of shape {['n', *stored]}, got "
                f"{images.dtype} of {list(images.shape)}"
            )
        return np.ascontiguousarray(np.moveaxis(images, -1, 1)) if self.shape[0] == 3 else images[:, None]

    def _labels(self, file: Any, part: str, size: int) -> NDArray[Any]:
        """Returns classes [n], or labels [n, L] as float32."""
        labels = self._array(file, f"{part}_labels")
        is_class = self.num_classes is not None
        most = self._number - 1 if is_class else 1
        expected = (size, 1 if is_class else self._number)
        if labels.shape != expected or labels.dtype.kind not in "iu":
            raise ValueError(
                f"MedMNIST: {part}_labels in {str(self._path)!r} must be whole numbers of shape {list(expected)}, got "
                f"{labels.dtype} of {list(labels.shape)}"
            )
        if size and (labels.min() < 0 or labels.max() > most):
            raise ValueError(
                f"MedMNIST: {part}_labels in {str(self._path)!r} must lie in 0 to {most}, got {labels.min()} to "
                f"{labels.max()}"
            )
        return labels[:, 0].astype(np.int64) if is_class else labels.astype(np.float32)

    def _array(self, file: Any, key: str) -> NDArray[Any]:
        try:
            array: NDArray[Any] = file[key]
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"MedMNIST: {key} in {str(self._path)!r} cannot be read ({error})") from error
        return array
