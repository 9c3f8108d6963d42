"""One index space over all images of a data set, and how a batch of them is gathered.

Training images come first, the official test images after them; partitions, populations and engines
speak of images by their index only. Shapes: S images in all, B in a batch.
"""

import copy
import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lcfl.core import rng
from lcfl.data.augmentation import Augmentation
from lcfl.data.conversion import as_input, as_integers, check_map_style, read_item, sampled

__all__ = ["DatasetSamples", "Samples", "TensorSamples"]

# Beyond this size a set stays in host memory and batches travel; below it, it is copied to the device once.
RESIDENT_BYTES = 4 * 2**30
WORTH_KEEPING = 0.75  # of the images: where more are in use, letting go of the others is not worth a copy

# Scale and shift of raw values, shaped to broadcast over a batch; None: used as they are.
_Affine = tuple[Tensor, Tensor] | None


class Samples(ABC):
    """All images of a data set under one index.

    Args:
        targets: [S] integer labels, training images first.
        num_train: indices below it are official training images, the rest official test images.
        num_classes: C; labels are 0, ..., C - 1.

    Raises:
        ValueError: labels that are no integers or lie outside 0, ..., C - 1.

    Attributes:
        augmentation: changes the inputs of training batches; None for none.
    """

    augmentation: Augmentation | None = None

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

    @abstractmethod
    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """The images at ``indices`` [B], in that order, as network inputs [B, ...] and labels [B] on ``device``.

        It may draw from global generators: the caller wraps it in ``rng.scope``.
        """

    def training_batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """``batch`` for a training step: changed by ``augmentation``, which draws from global generators."""
        return self.batch(indices, device)

    def is_random(self, training: bool) -> bool:
        """Whether a batch, or with `training` a training batch, may depend on global generators."""
        return True

    def pixels(self, inputs: Tensor) -> Tensor:
        """Network inputs [B, ...] as they were before normalisation, up to rounding."""
        return inputs

    def only(self, indices: NDArray[np.int64]) -> "Samples":
        """The same without the memory of other images than these, where that is worth a copy; or itself.

        Indices, labels and fingerprint stay what they are.
        """
        return self

    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the content: equal for the same images, labels and split, on every machine."""


class TensorSamples(Samples):
    """Images held as one tensor, gathered and normalised a batch at a time.

    uint8 inputs stay uint8 in memory and become float32 in 0..1 in the batch; floating ones become float32 at once,
    other types are used as they are.

    Args:
        inputs: [S, ...] inputs; images are [S, C, H, W].
        targets: [S] integer labels.
        num_train: how many of the S are training images; they come first.
        num_classes: number of labels.
        mean: per channel (axis 1), subtracted from the (0..1) inputs; needs ``std``.
        std: per channel, what the centred inputs are divided by.
        augmentation: changes the raw inputs of training batches.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: NDArray[Any] | Tensor | Sequence[int],
        num_train: int,
        num_classes: int,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        super().__init__(targets, num_train, num_classes)
        if len(inputs) != len(self.targets):
            raise ValueError(f"inputs and targets must be of equal length, got {len(inputs)} and {len(self.targets)}")
        self.inputs = as_input(inputs, "inputs").contiguous()
        _warn_of_gaps(self.inputs, range(len(self.inputs)), "inputs")
        self._labels = torch.from_numpy(self.targets)  # of `inputs`
        self.augmentation = augmentation
        self._affine = _affine(self.inputs, mean, std)
        self._placed: dict[torch.device, tuple[Tensor, Tensor, _Affine]] = {}
        self._fingerprint: str | None = None
        self._row: Tensor | None = None  # [S] where an image lies in `inputs`, -1: not any more; None: at its index

    def only(self, indices: NDArray[np.int64]) -> Samples:
        """A copy that holds the images at ``indices`` [n], if these are no more than three quarters of all."""
        if self._row is not None or len(indices) > WORTH_KEEPING * len(self):
            return self
        self.fingerprint()  # is one of all images
        kept = copy.copy(self)
        kept._row = torch.full((len(self),), -1)
        kept._row[indices] = torch.arange(len(indices))
        kept.inputs, kept._labels = self.inputs[torch.from_numpy(indices)], self._labels[indices]
        kept._placed = {}
        return kept

    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """One gather, then conversion and normalisation in place."""
        return self._batch(indices, device, None)

    def training_batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """The same with the augmentation between gather and normalisation."""
        return self._batch(indices, device, self.augmentation)

    def is_random(self, training: bool) -> bool:
        """Only a training batch that is augmented."""
        return training and self.augmentation is not None

    def pixels(self, inputs: Tensor) -> Tensor:
        """Undoes scale and shift: uint8 images are in 0..255 again."""
        return _unnormalised(inputs, self._affine)

    def _batch(
        self, indices: NDArray[np.int64] | Tensor, device: torch.device, augmentation: Augmentation | None
    ) -> tuple[Tensor, Tensor]:
        inputs, targets, affine = self._place(device)
        row = self._rows(torch.as_tensor(indices, dtype=torch.int64)).to(inputs.device)
        images = inputs.index_select(0, row).to(device)
        labels = targets.index_select(0, row).to(device)
        if augmentation is not None:
            images = augmentation(images)
        return _normalised(images, affine), labels

    def _rows(self, index: Tensor) -> Tensor:
        """Where images lie in ``inputs``."""
        if self._row is None:
            return index
        rows = self._row[index.cpu()]
        if (rows < 0).any():
            raise IndexError(
                f"image {int(index.cpu()[rows < 0][0])} is not in memory: nobody trains, validates or is tested on it, "
                "and it is not in the proxy set; data.population.images are the indices of those that are."
            )
        return rows

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
            self._placed[device] = (self.inputs.to(home), self._labels.to(home), affine)
        return self._placed[device]


class DatasetSamples(Samples):
    """Any map-style ``Dataset`` of (input, label) pairs, read item by item with its own transforms.

    Inputs are what ``lcfl.data.conversion.as_input`` takes, all of one shape and type; uint8 inputs are scaled to 0..1.
    Labels are read once: from an attribute ``targets`` or ``labels`` if it holds one integer per item, no
    ``target_transform`` changes it and it agrees with the items that are looked at; otherwise from every item.

    Args:
        train: the training images.
        test: the official test images, if there are any.
        num_classes: number of labels.

    Raises:
        ValueError: a data set that is not map-style or is empty, an item that is no pair, an input or a label that
            is unusable or unlike the first; names the item.
    """

    def __init__(self, train: Dataset[Any], test: Dataset[Any] | None, num_classes: int) -> None:
        self._parts: dict[str, Any] = {"train": train} if test is None else {"train": train, "test": test}
        for part in self._parts.values():
            check_map_style(part)
        # Random transforms run here too: what they draw must not shift the caller's generators.
        with rng.scope(0, "read items"):
            self._first, _ = read_item(train, "train", 0)
            targets = np.concatenate([self._labels(name) for name in self._parts])
        super().__init__(targets, len(self._parts["train"]), num_classes)
        self._affine = _affine(self._first.unsqueeze(0), None, None)
        self._fingerprint: str | None = None

    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """The items' inputs, stacked, and their labels."""
        index = np.asarray(indices)
        images = torch.stack([self._read(*self._position(int(each)))[0] for each in index]).to(device)
        return _normalised(images, self._affine), torch.from_numpy(self.targets[index]).to(device)

    def pixels(self, inputs: Tensor) -> Tensor:
        """Undoes the scale of uint8 inputs; what the data set's own transforms did stays."""
        return _unnormalised(inputs, self._affine)

    def fingerprint(self) -> str:
        """SHA-256 of labels, split, class names, raw ``data`` or ``tensors`` and a sample of items; computed once.

        The items are read in random streams of their own, so random transforms give equal ones every time. A data
        set that draws from a generator of its own does not: its items are left out, with a warning.
        """
        if self._fingerprint is None:
            digest = hashlib.sha256(f"{self.num_train}/{self.num_classes}".encode())
            _update(digest, self.targets)
            for name, part in self._parts.items():
                digest.update(f"{type(part).__module__}.{type(part).__qualname__}".encode())
                for raw in (getattr(part, "data", None), *getattr(part, "tensors", ())):
                    if isinstance(raw, Tensor | np.ndarray):
                        _update(digest, raw)
                digest.update(self._sample_digest(name))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _sample_digest(self, name: str) -> bytes:
        """SHA-256 of a sample of a part's items; nothing if a second reading gives others."""
        once, again = hashlib.sha256(), hashlib.sha256()
        for digest in (once, again):
            for index in sampled(len(self._parts[name])):
                with rng.scope(0, "fingerprint", index):
                    _update(digest, self._read(name, index)[0])
        if once.digest() == again.digest():
            return once.digest()
        warnings.warn(
            f"data.dataset: Datasets: items of {name} differ from one reading to the next, so a resumed run will not "
            "have the same bits and does not compare them. Draw what is random in them from torch's, numpy's or "
            "Python's global generator, which lcfl seeds for every client and round.",
            stacklevel=2,
        )
        return b""

    def _labels(self, name: str) -> NDArray[Any]:
        """A part's labels; reads a sample of its items at least."""
        part, sample = self._parts[name], sampled(len(self._parts[name]))
        items = [self._read(name, index) for index in sample]
        if items:
            _warn_of_gaps(torch.stack([image for image, _ in items]), sample, f"items of {name} that were looked at")
        seen = [label for _, label in items]
        untransformed = getattr(part, "target_transform", None) is None
        for attribute in ("targets", "labels") if untransformed else ():
            known = as_integers(getattr(part, attribute, None))
            if known is not None and known.shape == (len(part),) and known[sample].tolist() == seen:
                return known
        return np.array([self._read(name, index)[1] for index in range(len(part))], dtype=np.int64)

    def _read(self, name: str, index: int) -> tuple[Tensor, int]:
        """An item whose input is like the first one."""
        image, label = read_item(self._parts[name], name, index)
        if image.shape != self._first.shape or image.dtype != self._first.dtype:
            raise ValueError(
                f"Datasets: item {index} of {name} has an input of shape {tuple(image.shape)} and {image.dtype}, item "
                f"0 of train of {tuple(self._first.shape)} and {self._first.dtype}; all inputs must be alike: resize, "
                "crop or pad them in the data set's transform"
            )
        return image, label

    def _position(self, index: int) -> tuple[str, int]:
        """Part and position in it of an index."""
        return ("train", index) if index < self.num_train else ("test", index - self.num_train)


def _warn_of_gaps(inputs: Tensor, numbers: Sequence[int], what: str) -> None:
    """Of NaN and infinity, which would look like a learning rate that is too large."""
    if not inputs.is_floating_point() or inputs.numel() == 0:
        return
    broken = torch.nonzero(~inputs.reshape(len(inputs), -1).isfinite().all(dim=1)).flatten().tolist()
    if broken:
        warnings.warn(
            f"data.dataset: {len(broken)} of {len(inputs)} {what} hold NaN or infinity (the first is number "
            f"{numbers[broken[0]]}): models that learn from them become NaN. Fill such values in, or leave them out.",
            stacklevel=3,
        )


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


def _normalised(images: Tensor, affine: _Affine) -> Tensor:
    """Applies scale and shift, in place where the images are floating."""
    if affine is None:
        return images
    scale, shift = affine
    return (images if images.is_floating_point() else images.float()).mul_(scale).add_(shift)


def _unnormalised(images: Tensor, affine: _Affine) -> Tensor:
    if affine is None:
        return images
    scale, shift = (each.to(images.device) for each in affine)
    return (images - shift) / scale


def _update(digest: Any, values: Tensor | NDArray[Any]) -> None:
    """Feeds type, shape and bytes of an array to the digest."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    digest.update(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
