"""Data sets that need no file."""

import numpy as np
import torch

from lcfl.core import rng
from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.samples import Samples, TensorSamples

__all__ = ["Digits", "RandomLike", "Synthetic"]


class Digits(FederatedDataset):
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, scaled to 0..1. Needs no file, has no official test."""

    shape, num_classes = (1, 8, 8), 10

    def load(self) -> Samples:
        """All images are training images."""
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]

        images, targets = load_digits(return_X_y=True)
        # Pixels count 0 to 16, which float32 holds exactly after division by a power of two.
        inputs = torch.from_numpy(images.astype(np.float32) / 16).reshape(-1, *self.shape)
        return TensorSamples(inputs, targets, len(targets), self.num_classes)


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

    def load(self) -> Samples:
        """Classes in order, within the training and within the test part."""
        centres = rng.generator(self._seed, "blob centres").normal(0, self._separation, (self.num_classes, *self.shape))
        targets = np.concatenate([np.repeat(np.arange(self.num_classes), count) for count in self._per_class])
        noise = rng.generator(self._seed, "blob noise").normal(size=(len(targets), *self.shape))
        inputs = torch.from_numpy((centres[targets] + noise).astype(np.float32))
        return TensorSamples(inputs, targets, self.num_classes * self._per_class[0], self.num_classes)


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
        self.augmentation = dataset.augmentation
        self._num_samples, self._seed = num_samples, seed

    def load(self) -> Samples:
        """Labels 0, 1, ..., C - 1, 0, 1, ... in both parts."""
        num_test = max(self.num_classes, self._num_samples // 4)
        targets = np.concatenate([np.arange(count) % self.num_classes for count in (self._num_samples, num_test)])
        size = (len(targets), *self.shape)
        if self.dtype.is_floating_point:
            pixels = rng.generator(self._seed, "random inputs").integers(0, 256, size, dtype=np.uint8)
            inputs = torch.from_numpy(pixels)
        else:
            inputs = torch.zeros(size, dtype=self.dtype)
        return TensorSamples(inputs, targets, self._num_samples, self.num_classes, augmentation=self.augmentation)
