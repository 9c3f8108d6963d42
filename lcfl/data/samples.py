"""One index space over all samples of a data set, and the code that gathers a batch of them.

Training samples come first and official test samples follow. Partitions, populations and engines refer to samples by
their index only. Shapes: S samples in all, B in a batch.
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
from lcfl.core.messages import all_finite
from lcfl.data.augmentation import Augmentation
from lcfl.data.conversion import as_input, as_integers, check_map_style, evenly_spaced, read_item

__all__ = ["DatasetSamples", "Samples", "TensorSamples"]

# A data set up to this size is copied to the device once. A larger one stays in host memory and only batches are
# copied.
RESIDENT_BYTES = 4 * 2**30
# If more than this fraction of the samples is in use, freeing the other samples is not worth a copy.
WORTH_KEEPING = 0.75

# Scale and shift of raw values, shaped to broadcast over a batch; None if the values are used unchanged.
_Affine = tuple[Tensor, Tensor] | None


class Samples(ABC):
    """All samples of a data set under one index.

    Args:
        targets: [S] integer labels, training samples first.
        num_train: number of official training samples. Indices below it are training samples, all others are official
            test samples.
        num_classes: C, the number of classes; labels are 0, ..., C - 1.

    Raises:
        ValueError: If labels are not integers or lie outside 0, ..., C - 1, or if there are no training samples.

    Attributes:
        augmentation: changes the inputs of training batches; None if nothing changes them.
    """

    augmentation: Augmentation | None = None

    def __init__(self, targets: NDArray[Any] | Tensor | Sequence[int], num_train: int, num_classes: int) -> None:
        self.targets = _checked_targets(targets, num_classes)
        self.num_classes = num_classes
        self.num_train = num_train
        if not 0 < num_train <= len(self.targets):
            raise ValueError(
                f"a data set needs training samples: got num_train {num_train} of {len(self.targets)} samples in all"
            )

    def __len__(self) -> int:
        """Returns S, the number of training and test samples together."""
        return len(self.targets)

    @abstractmethod
    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns network inputs [B, ...] and labels [B] on ``device`` of the samples at ``indices`` [B], in order.

        It may draw from global generators, so the caller wraps it in ``rng.seeded``.
        """

    def training_batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns a ``batch`` for a training step, changed by ``augmentation``, which draws from global generators."""
        return self.batch(indices, device)

    def is_random(self, training: bool) -> bool:
        """Returns whether a batch, or with ``training`` a training batch, may depend on global generators."""
        return True

    def pixels(self, inputs: Tensor) -> Tensor:
        """Returns network inputs [B, ...] as they were before normalisation, up to rounding."""
        return inputs

    def subset(self, indices: NDArray[np.int64]) -> "Samples":
        """Returns the same data set without the memory of all other samples, or itself if a copy is not worth it.

        Indices, labels and fingerprint do not change.
        """
        return self

    @abstractmethod
    def fingerprint(self) -> str:
        """Returns the SHA-256 (hex) of the content: the same inputs, labels and split give it on every machine."""


class TensorSamples(Samples):
    """Samples held as one tensor, gathered and normalised one batch at a time.

    uint8 inputs stay uint8 in memory and become float32 in 0..1 in the batch. Floating-point inputs become float32 at
    once. Inputs of other types keep their type.

    Args:
        inputs: [S, ...] inputs; [S, C, H, W] for images.
        targets: [S] integer labels.
        num_train: number of training samples among the S samples; they come first.
        num_classes: number of labels.
        mean: one number per channel (axis 1), subtracted from the (0..1) inputs; requires ``std``.
        std: one number per channel, by which the centred inputs are divided.
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
        if not all_finite(self.inputs):
            finite = self.inputs.reshape(len(self.inputs), -1).isfinite().all(dim=1)
            _warn_of_gaps(torch.nonzero(~finite).flatten().tolist(), f"{len(self.inputs)} inputs")
        self._labels = torch.from_numpy(self.targets)  # the labels of `inputs`, in the same order
        self.augmentation = augmentation
        self._affine = _affine(self.inputs, mean, std)
        self._placed: dict[torch.device, tuple[Tensor, Tensor, _Affine]] = {}
        self._fingerprint: str | None = None
        # [S] row of each sample in `inputs`, -1 if it is no longer there; None if every sample is at its index.
        self._row: Tensor | None = None

    def subset(self, indices: NDArray[np.int64]) -> Samples:
        """Returns a copy that holds only the samples at ``indices`` [n], or itself if these are over 3/4 of all."""
        if self._row is not None or len(indices) > WORTH_KEEPING * len(self):
            return self
        self.fingerprint()  # the copy inherits the fingerprint of all samples
        subset = copy.copy(self)
        subset._row = torch.full((len(self),), -1)
        subset._row[indices] = torch.arange(len(indices))
        subset.inputs, subset._labels = self.inputs[torch.from_numpy(indices)], self._labels[indices]
        subset._placed = {}
        return subset

    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Gathers a batch in one step, then converts and normalises it in place."""
        return self._batch(indices, device, None)

    def training_batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Gathers a batch and augments it before it is normalised."""
        return self._batch(indices, device, self.augmentation)

    def is_random(self, training: bool) -> bool:
        """Returns True only for training batches that are augmented."""
        return training and self.augmentation is not None

    def pixels(self, inputs: Tensor) -> Tensor:
        """Undoes scale and shift, so that uint8 inputs are in 0..255 again."""
        return _unnormalised(inputs, self._affine)

    def _batch(
        self, indices: NDArray[np.int64] | Tensor, device: torch.device, augmentation: Augmentation | None
    ) -> tuple[Tensor, Tensor]:
        inputs, targets, affine = self._place(device)
        row = self._rows(torch.as_tensor(indices, dtype=torch.int64)).to(inputs.device)
        batch = inputs.index_select(0, row).to(device)
        labels = targets.index_select(0, row).to(device)
        if augmentation is not None:
            batch = augmentation(batch)
        return _normalised(batch, affine), labels

    def _rows(self, index: Tensor) -> Tensor:
        """Returns the rows of ``inputs`` that hold the samples at ``index``."""
        if self._row is None:
            return index
        rows = self._row[index.cpu()]
        if (rows < 0).any():
            raise IndexError(
                f"sample {int(index.cpu()[rows < 0][0])} is not in memory: no client trains on it, validates on it or "
                "is tested on it, and it is not in the proxy set. data.population.samples_in_use lists the samples in "
                "memory."
            )
        return rows

    def fingerprint(self) -> str:
        """Returns the SHA-256 of inputs, labels, split and normalisation. It is computed once."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            _update(digest, self.inputs)
            _update(digest, self.targets)
            for coefficient in self._affine or ():
                _update(digest, coefficient)
            digest.update(f"{self.num_train}/{self.num_classes}".encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _place(self, device: torch.device) -> tuple[Tensor, Tensor, _Affine]:
        """Returns inputs and labels, and scale and shift, on the devices where they are used.

        Inputs and labels are placed where batches are gathered, scale and shift where they are applied. This is done
        once per device.
        """
        if device not in self._placed:
            home = device if self.inputs.nbytes <= RESIDENT_BYTES else torch.device("cpu")
            affine = None if self._affine is None else (self._affine[0].to(device), self._affine[1].to(device))
            self._placed[device] = (self.inputs.to(home), self._labels.to(home), affine)
        return self._placed[device]


class DatasetSamples(Samples):
    """Any map-style ``Dataset`` of (input, label) pairs, read item by item with its own transforms.

    Inputs may be anything that `lcfl.data.conversion.as_input` accepts. They must all have one shape and type. uint8
    inputs are scaled to 0..1. Labels are read once. They come from an attribute ``targets`` or ``labels`` if it holds
    one integer per item, no ``target_transform`` changes it and it agrees with the inspected items. Otherwise every
    item is read for its label.

    Args:
        train: the training samples.
        test: the official test samples, if there are any.
        num_classes: number of labels.

    Raises:
        ValueError: If a data set is not map-style or is empty, an item is not a pair, or an input or a label is
            unusable or unlike the first one. The message names the item.
    """

    def __init__(self, train: Dataset[Any], test: Dataset[Any] | None, num_classes: int) -> None:
        self._parts: dict[str, Any] = {"train": train} if test is None else {"train": train, "test": test}
        for part in self._parts.values():
            check_map_style(part)
        # Random transforms run here too, and their draws must not advance the caller's generators.
        with rng.seeded(0, "read items"):
            self._first, _ = read_item(train, "train", 0)
            targets = np.concatenate([self._labels(name) for name in self._parts])
        super().__init__(targets, len(self._parts["train"]), num_classes)
        self._affine = _affine(self._first.unsqueeze(0), None, None)
        self._fingerprint: str | None = None

    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Reads the items and returns their stacked inputs and their labels."""
        index = np.asarray(indices)
        inputs = torch.stack([self._read(*self._position(int(number)))[0] for number in index]).to(device)
        return _normalised(inputs, self._affine), torch.from_numpy(self.targets[index]).to(device)

    def pixels(self, inputs: Tensor) -> Tensor:
        """Undoes the scaling of uint8 inputs. Changes by the data set's own transforms stay."""
        return _unnormalised(inputs, self._affine)

    def fingerprint(self) -> str:
        """Returns the SHA-256 of labels, split, class names, raw ``data`` or ``tensors`` and a selection of items.

        It is computed once. Each item is read in a separate random stream, so random transforms give equal items every
        time. This fails for a data set that draws from a private generator: its items are left out, with a warning.
        """
        if self._fingerprint is None:
            digest = hashlib.sha256(f"{self.num_train}/{self.num_classes}".encode())
            _update(digest, self.targets)
            for name, part in self._parts.items():
                digest.update(f"{type(part).__module__}.{type(part).__qualname__}".encode())
                for raw in (getattr(part, "data", None), *getattr(part, "tensors", ())):
                    if isinstance(raw, Tensor | np.ndarray):
                        _update(digest, raw)
                digest.update(self._digest_of_items(name))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _digest_of_items(self, name: str) -> bytes:
        """Returns the SHA-256 of a selection of a part's items, or nothing if a second reading gives other items."""
        once, again = hashlib.sha256(), hashlib.sha256()
        for digest in (once, again):
            for index in evenly_spaced(len(self._parts[name])):
                with rng.seeded(0, "fingerprint", index):
                    _update(digest, self._read(name, index)[0])
        if once.digest() == again.digest():
            return once.digest()
        warnings.warn(
            f"data.dataset: Datasets: items of {name} differ from one reading to the next. A resumed run will "
            "therefore not be bit-identical, and lcfl does not compare the items when it resumes. Let random "
            "transforms draw from the global generator of torch, numpy or Python, which lcfl seeds for every "
            "client and round.",
            stacklevel=2,
        )
        return b""

    def _labels(self, name: str) -> NDArray[Any]:
        """Returns the labels of a part. It reads a selection of the part's items, and all if no attribute agrees."""
        part, inspected = self._parts[name], evenly_spaced(len(self._parts[name]))
        seen, broken = self._inspect(name, inspected)
        untransformed = getattr(part, "target_transform", None) is None
        for attribute in ("targets", "labels") if untransformed else ():
            labels = as_integers(getattr(part, attribute, None))
            if labels is not None and labels.shape == (len(part),) and labels[inspected].tolist() == seen:
                break
        else:
            inspected = list(range(len(part)))
            seen, broken = self._inspect(name, inspected)
            labels = np.array(seen, dtype=np.int64)
        _warn_of_gaps(broken, f"{len(inspected)} inspected items of {name}")
        return labels

    def _inspect(self, name: str, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """Reads items. Returns their labels, and the indices of those that hold NaN or infinity."""
        labels, broken = [], []
        for index in indices:
            inputs, label = self._read(name, index)
            labels.append(label)
            if not all_finite(inputs):
                broken.append(index)
        return labels, broken

    def _read(self, name: str, index: int) -> tuple[Tensor, int]:
        """Reads an item and checks that shape and type of its input are those of the first item."""
        inputs, label = read_item(self._parts[name], name, index)
        if inputs.shape != self._first.shape or inputs.dtype != self._first.dtype:
            raise ValueError(
                f"Datasets: item {index} of {name} has an input of shape {tuple(inputs.shape)} and type "
                f"{inputs.dtype}, but item 0 of train has shape {tuple(self._first.shape)} and type "
                f"{self._first.dtype}; all inputs must have the same shape and type: resize, crop or pad them in the "
                "data set's transform"
            )
        return inputs, label

    def _position(self, index: int) -> tuple[str, int]:
        """Returns the part that an index belongs to, and the position in that part."""
        return ("train", index) if index < self.num_train else ("test", index - self.num_train)


def _warn_of_gaps(broken: Sequence[int], what: str) -> None:
    """Warns of inputs with NaN or infinity, whose effect looks like that of a learning rate that is too large."""
    if broken:
        warnings.warn(
            f"data.dataset: {len(broken)} of {what} hold NaN or infinity (the first is number {broken[0]}). Models "
            "that learn from them become NaN. Replace these values or drop the samples.",
            stacklevel=3,
        )


def _checked_targets(targets: NDArray[Any] | Tensor | Sequence[int], num_classes: int) -> NDArray[np.int64]:
    array = np.asarray(targets)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"labels must be one integer per sample, got shape {array.shape} of {array.dtype}")
    outside = np.flatnonzero((array < 0) | (array >= num_classes))
    if outside.size:
        raise ValueError(
            f"labels must lie in 0 to {num_classes - 1} (num_classes {num_classes}), got {array.min()} to "
            f"{array.max()} ({outside.size} outside; the first is that of sample {outside[0]}); correct num_classes or "
            "renumber the labels"
        )
    return np.ascontiguousarray(array, dtype=np.int64)


def _affine(inputs: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> _Affine:
    """Returns the scale and shift that normalise raw values, shaped to broadcast over a batch."""
    full = 255.0 if inputs.dtype == torch.uint8 else 1.0
    if mean is None and std is None:
        return None if full == 1.0 else (torch.tensor(1 / full), torch.tensor(0.0))
    channels = inputs.shape[1] if inputs.ndim > 1 else 1
    if mean is None or std is None or not len(mean) == len(std) == channels or min(std) <= 0:
        raise ValueError(
            f"mean and std must each give {channels} numbers (one per channel), std > 0; got {mean}, {std}"
        )
    if inputs.dtype != torch.uint8 and not inputs.is_floating_point():
        raise ValueError(f"only uint8 and floating-point inputs can be normalised, got {inputs.dtype}; leave mean out")
    shape = (1, channels) + (1,) * (inputs.ndim - 2)
    deviations = torch.tensor(std, dtype=torch.float64)
    scale = (1 / (full * deviations)).float().reshape(shape)
    shift = (-torch.tensor(mean, dtype=torch.float64) / deviations).float().reshape(shape)
    return scale, shift


def _normalised(inputs: Tensor, affine: _Affine) -> Tensor:
    """Applies scale and shift, in place if the inputs are floating-point numbers."""
    if affine is None:
        return inputs
    scale, shift = affine
    return (inputs if inputs.is_floating_point() else inputs.float()).mul_(scale).add_(shift)


def _unnormalised(inputs: Tensor, affine: _Affine) -> Tensor:
    if affine is None:
        return inputs
    scale, shift = (coefficient.to(inputs.device) for coefficient in affine)
    return (inputs - shift) / scale


def _update(digest: Any, values: Tensor | NDArray[Any]) -> None:
    """Feeds type, shape and bytes of an array to the digest."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    digest.update(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
