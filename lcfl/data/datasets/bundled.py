"""Data sets that need no files."""

import numpy as np
import torch

from lcfl.core import rng
from lcfl.core.memory import check_memory
from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.samples import Samples, TensorSamples

__all__ = ["Digits", "RandomLike", "Synthetic"]


class Digits(FederatedDataset):
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, scaled to 0..1.

    It needs no files and has no official test samples.
    """

    shape, num_classes = (1, 8, 8), 10

    def load(self) -> Samples:
        """Returns all images as training samples."""
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]

        images, targets = load_digits(return_X_y=True)
        # Pixels are integers from 0 to 16, so division by a power of two is exact in float32.
        inputs = torch.from_numpy(images.astype(np.float32) / 16).reshape(-1, *self.shape)
        return TensorSamples(inputs, targets, len(targets), self.num_classes)


class Synthetic(FederatedDataset):
    """One Gaussian blob per class, x = centre_k + noise, for tests and first experiments.

    Args:
        num_classes: number of blobs.
        num_features: number of features of one input.
        samples_per_class: number of training samples of each class.
        test_per_class: number of official test samples of each class; may be 0.
        separation: standard deviation of the centres' coordinates, in units of the standard deviation of the noise. Two
            centres are about separation * sqrt(2 num_features) apart.
        seed: seed of centres and noise.
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
                f"separation must be at least 0; got {num_classes}, {num_features}, {samples_per_class}, "
                f"{test_per_class} and {separation}"
            )
        numbers = num_classes * (samples_per_class + test_per_class) * num_features
        check_memory("Synthetic: the samples need", 8 * numbers, "Lower the number of samples, classes or features.")
        self.shape, self.num_classes = (num_features,), num_classes
        self._num_classes, self._per_class = num_classes, (samples_per_class, test_per_class)
        self._separation, self._seed = separation, seed

    def load(self) -> Samples:
        """Returns the samples sorted by class within the training part and within the test part."""
        centres = rng.generator(self._seed, "blob centres").normal(
            0, self._separation, (self._num_classes, *self.shape)
        )
        targets = np.concatenate([np.repeat(np.arange(self._num_classes), count) for count in self._per_class])
        noise = rng.generator(self._seed, "blob noise").normal(size=(len(targets), *self.shape))
        inputs = torch.from_numpy((centres[targets] + noise).astype(np.float32))
        return TensorSamples(inputs, targets, self._num_classes * self._per_class[0], self._num_classes)


class RandomLike(FederatedDataset):
    """Random inputs with the shape and targets of another data set, whose files are not read.

    ``fast_dev_run`` uses it to run every code path without a download. Labels are balanced and carry no meaning.
    Integer inputs are 0 or 1, which every vocabulary of two tokens contains. Targets other than labels are all 0.

    Args:
        dataset: the data set to stand in for.
        num_samples: number of training samples. There are a quarter as many official test samples, but at least one per
            class.
        seed: seed of the inputs.
    """

    def __init__(self, dataset: FederatedDataset, num_samples: int, seed: int = 0) -> None:
        if num_samples < (dataset.num_classes or 1):
            raise ValueError(
                f"RandomLike: num_samples must be at least one per class ({dataset.num_classes}), got {num_samples}"
            )
        self.shape, self.num_classes, self.dtype = dataset.shape, dataset.num_classes, dataset.dtype
        self.target_shape, self.target_dtype = dataset.target_shape, dataset.target_dtype
        self.augmentation = dataset.augmentation
        self._num_samples, self._seed = num_samples, seed

    def load(self) -> Samples:
        """Returns samples with labels 0, 1, ..., C - 1, 0, 1, ... in both parts, or with targets of zeros."""
        num_test = max(self.num_classes or 1, self._num_samples // 4)
        if self.num_classes is None:
            targets = self.spec.blank(self._num_samples + num_test)[1]
        else:
            counts = self._num_samples, num_test
            targets = torch.from_numpy(np.concatenate([np.arange(count) % self.num_classes for count in counts]))
        size = (len(targets), *self.shape)
        is_image = self.dtype.is_floating_point
        numbers = rng.generator(self._seed, "random inputs").integers(0, 256 if is_image else 2, size, dtype=np.uint8)
        inputs = torch.from_numpy(numbers) if is_image else torch.from_numpy(numbers).to(self.dtype)
        return TensorSamples(inputs, targets, self._num_samples, self.num_classes, augmentation=self.augmentation)
