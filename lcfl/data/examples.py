"""One index space over all images of a data set, and how a batch of them is gathered.

Training images come first, the official test images after them; partitions, populations and engines
speak of images by their index only. Shapes: S images in all, B in a batch.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from lcfl import rng

__all__ = ["DatasetExamples", "Examples", "TensorExamples"]

# Beyond this size a set stays in host memory and batches travel; below it, it is copied to the device once.
RESIDENT_BYTES = 4 * 2**30

# Scale and shift of raw values, shaped to broadcast over a batch; None: used as they are.
_Affine = tuple[Tensor, Tensor] | None


class Examples(ABC):
    """All images of a data set under one index.

    Args:
        targets: [S] integer labels, training images first.
        num_train: indices below it are official training images, the rest official test images.
        num_classes: C; labels are 0, ..., C - 1.

    Raises:
        ValueError: labels that are no integers or lie outside 0, ..., C - 1.
    """

    def __init__(self, targets: NDArray[Any] | Tensor | Sequence[int], num_train: int, num_classes: int) -> None:
        self.targets = _checked_targets(targets, num_classes)
        self.num_classes = num_classes
        self.num_train = num_train
        if not 0 < num_train <= len(self.targets):
            raise ValueError(
                f"a data set needs training images: got num_train {num_train} of {len(self.targets)} images in all"
            )

    def __len__(self) -> int:
        """S, training and test images together."""
        return len(self.targets)

    @property
    def random(self) -> bool:
        """Whether ``batch`` may draw from global generators; the caller then wraps it in ``rng.scope``."""
        return False

    @abstractmethod
    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """The images at ``indices`` [B], in that order, as network inputs [B, ...] and labels [B] on ``device``."""

    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the content: equal for the same images, labels and split, on every machine."""


class TensorExamples(Examples):
    """Images held as one tensor, gathered and normalised a batch at a time.

    uint8 inputs stay uint8 in memory and become float32 in 0..1 in the batch; other types are used as they are.

    Args:
        inputs: [S, ...] inputs; images are [S, C, H, W].
        targets: [S] integer labels.
        num_train: how many of the S are training images; they come first.
        num_classes: number of labels.
        mean: per channel (axis 1), subtracted from the (0..1) inputs; needs ``std``.
        std: per channel, what the centred inputs are divided by.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: NDArray[Any] | Tensor | Sequence[int],
        num_train: int,
        num_classes: int,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__(targets, num_train, num_classes)
        if len(inputs) != len(self.targets):
            raise ValueError(f"inputs and targets must be of equal length, got {len(inputs)} and {len(self.targets)}")
        self.inputs = inputs.contiguous()
        self._affine = _affine(self.inputs, mean, std)
        self._placed: dict[torch.device, tuple[Tensor, Tensor, _Affine]] = {}
        self._fingerprint: str | None = None

    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """One gather, then conversion and normalisation in place."""
        inputs, targets, affine = self._place(device)
        index = torch.as_tensor(indices, dtype=torch.int64).to(inputs.device)
        images = inputs.index_select(0, index).to(device)
        labels = targets.index_select(0, index).to(device)
        if affine is not None:
            scale, shift = affine
            images = (images if images.is_floating_point() else images.float()).mul_(scale).add_(shift)
        return images, labels

    def fingerprint(self) -> str:
        """SHA-256 of inputs, labels, split and normalisation; computed once."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            _update(digest, self.inputs)
            _update(digest, self.targets)
            for each in self._affine or ():
                _update(digest, each)
            digest.update(f"{self.num_train}/{self.num_classes}".encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _place(self, device: torch.device) -> tuple[Tensor, Tensor, _Affine]:
        """Images and labels where they are gathered, scale and shift where they are applied; made once per device."""
        if device not in self._placed:
            home = device if self.inputs.nbytes <= RESIDENT_BYTES else torch.device("cpu")
            affine = None if self._affine is None else (self._affine[0].to(device), self._affine[1].to(device))
            self._placed[device] = (self.inputs.to(home), torch.from_numpy(self.targets).to(home), affine)
        return self._placed[device]


class DatasetExamples(Examples):
    """Any map-style ``Dataset`` of (input, label) pairs, read item by item with its own transforms.

    Labels are taken from an attribute ``targets`` or ``labels`` where there is one and no ``target_transform``
    changes it; otherwise every item is read once.

    Args:
        train: the training images.
        test: the official test images, if there are any.
        num_classes: number of labels.
    """

    def __init__(self, train: Dataset[Any], test: Dataset[Any] | None, num_classes: int) -> None:
        self._parts: list[Any] = [train] if test is None else [train, test]
        for part in self._parts:
            if isinstance(part, IterableDataset) or not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
                raise ValueError(
                    f"data sets must be map-style (with __len__ and __getitem__), got {type(part).__name__}; "
                    "read an iterable one into a list of (input, label) pairs first"
                )
        targets = np.concatenate([_labels_of(part) for part in self._parts])
        super().__init__(targets, len(self._parts[0]), num_classes)

    @property
    def random(self) -> bool:
        """True: what transforms draw cannot be seen from outside."""
        return True

    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """``default_collate`` of the items."""
        inputs, targets = default_collate([self._item(int(index)) for index in indices])
        return inputs.to(device), torch.as_tensor(targets, dtype=torch.int64).to(device)

    def fingerprint(self) -> str:
        """SHA-256 of labels, split, class names and of the raw ``data`` or ``tensors``, where a data set has them.

        Items themselves are not hashed: they may be slow to read, and random.
        """
        digest = hashlib.sha256(f"{self.num_train}/{self.num_classes}".encode())
        _update(digest, self.targets)
        for part in self._parts:
            digest.update(f"{type(part).__module__}.{type(part).__qualname__}".encode())
            for raw in (getattr(part, "data", None), *getattr(part, "tensors", ())):
                if isinstance(raw, Tensor | np.ndarray):
                    _update(digest, raw)
        return digest.hexdigest()

    def _item(self, index: int) -> Any:
        return self._parts[0][index] if index < self.num_train else self._parts[1][index - self.num_train]


def _labels_of(dataset: Any) -> NDArray[Any]:
    for name in ("targets", "labels"):
        if hasattr(dataset, name) and getattr(dataset, "target_transform", None) is None:
            return np.asarray(getattr(dataset, name))
    # Random transforms run here too: what they draw must not shift the caller's generators.
    with rng.scope(0, "read labels"):
        return np.asarray([dataset[index][1] for index in range(len(dataset))])


def _checked_targets(targets: NDArray[Any] | Tensor | Sequence[int], num_classes: int) -> NDArray[np.int64]:
    array = np.asarray(targets)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"labels must be one integer per image, got shape {array.shape} of {array.dtype}")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < num_classes:
        raise ValueError(
            f"labels must lie in 0 to {num_classes - 1} (num_classes {num_classes}), "
            f"got {array.min()} to {array.max()}; correct num_classes or renumber the labels"
        )
    return np.ascontiguousarray(array, dtype=np.int64)


def _affine(inputs: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> _Affine:
    """Scale and shift that turn raw values into normalised ones, shaped to broadcast over a batch."""
    full = 255.0 if inputs.dtype == torch.uint8 else 1.0
    if mean is None and std is None:
        return None if full == 1.0 else (torch.tensor(1 / full), torch.tensor(0.0))
    channels = inputs.shape[1] if inputs.ndim > 1 else 1
    if mean is None or std is None or not len(mean) == len(std) == channels or min(std) <= 0:
        raise ValueError(
            f"mean and std must each give {channels} numbers (one per channel), std > 0; got {mean}, {std}"
        )
    if inputs.dtype != torch.uint8 and not inputs.is_floating_point():
        raise ValueError(f"only uint8 and floating-point inputs can be normalised, got {inputs.dtype}; leave out mean")
    shape = (1, channels) + (1,) * (inputs.ndim - 2)
    deviations = torch.tensor(std, dtype=torch.float64)
    scale = (1 / (full * deviations)).float().reshape(shape)
    shift = (-torch.tensor(mean, dtype=torch.float64) / deviations).float().reshape(shape)
    return scale, shift


def _update(digest: Any, values: Tensor | NDArray[Any]) -> None:
    """Feeds type, shape and bytes of an array to the digest."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    digest.update(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
