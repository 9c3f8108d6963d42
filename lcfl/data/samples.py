"""One index space over all samples of a data set, and the code that gathers a batch of them.

Training samples come first and official test samples follow. Partitions, populations and engines refer to samples by
their index only. Shapes: S samples in all, B in a batch.
"""

import copy
import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from numbers import Number
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core.messages import all_finite
from lcfl.core.raw_bytes import raw_bytes
from lcfl.data.augmentation import Augmentation
from lcfl.data.conversion import as_input, as_targets, target_dtype
from lcfl.data.normalisation import Affine, affine_of, normalised, unnormalised

__all__ = ["Samples", "TensorSamples", "update_digest", "warn_of_gaps"]

# A data set up to this size is copied to the device once. A larger one stays in host memory and only batches are
# copied.
RESIDENT_BYTES = 4 * 2**30
# If more than this fraction of the samples is in use, freeing the other samples is not worth a copy.
WORTH_KEEPING = 0.75
# Float32 inputs that are gathered at once for several steps, which fit into a processor's cache.
CACHED_BYTES = 2**20


class Samples(ABC):
    """All samples of a data set under one index.

    Args:
        labels: [S] class of each sample, training samples first; None if targets are not classes.
        num_train: number of official training samples. Indices below it are training samples, all others are official
            test samples.
        num_classes: C, the number of classes; labels are 0, ..., C - 1. None if targets are not classes.
        num_samples: S, which must be given if there are no labels.

    Raises:
        ValueError: if labels are not integers or lie outside 0, ..., C - 1, or if there are no training samples.

    Attributes:
        augmentation: changes the inputs of training batches; None if nothing changes them.
        normalisation: mean and deviation of each channel, by which inputs in 0..1 are normalised; None if nobody knows.
        has_cheap_targets: whether targets are read without their inputs.
        most_at_once: the number of samples that may be gathered at once for several training steps.
    """

    augmentation: Augmentation | None = None
    normalisation: dict[str, list[float]] | None = None
    has_cheap_targets: bool = False
    most_at_once: int = 1

    def __init__(
        self,
        labels: NDArray[Any] | Tensor | Sequence[int] | None,
        num_train: int,
        num_classes: int | None,
        num_samples: int | None = None,
    ) -> None:
        self.labels = None
        if labels is not None:
            assert num_classes is not None, "labels are numbers of classes"
            self.labels = _checked_labels(labels, num_classes)
            num_samples = len(self.labels)
        assert num_samples is not None, "without labels, the number of samples must be given"
        self.num_classes = num_classes
        self.num_train = num_train
        self._num_samples = num_samples
        if not 0 < num_train <= num_samples:
            raise ValueError(
                f"a data set needs training samples: got num_train {num_train} of {num_samples} samples in all"
            )

    def __len__(self) -> int:
        """Returns S, the number of training and test samples together."""
        return self._num_samples

    @abstractmethod
    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns inputs [B, ...] and targets [B, ...] on ``device`` of the samples at ``indices`` [B], in order.

        It may draw from global generators, so the caller wraps it in ``rng.seeded``.
        """

    def training_batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns a ``batch`` for a training step, changed by ``augmentation``, which draws from global generators."""
        return self.batch(indices, device)

    def training_batches(
        self, batches: Iterable[NDArray[np.int64]], device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the ``training_batch`` of each step. If nothing is drawn, those of several steps are gathered at once.

        Args:
            batches: the indices [B] of each step.
            device: where the batches go.
        """
        at_once = 1 if self.is_random(training=True) else self.most_at_once
        group: list[NDArray[np.int64]] = []
        for indices in batches:
            if group and sum(map(len, group)) + len(indices) > at_once:
                yield from self._divided(group, device)
                group = []
            group.append(indices)
        if group:
            yield from self._divided(group, device)

    def _divided(self, group: Sequence[NDArray[np.int64]], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the training batches of a group, gathered at once."""
        inputs, targets = self.training_batch(np.concatenate(group), device)
        for end, indices in zip(accumulate(map(len, group)), group, strict=True):
            rows = slice(end - len(indices), end)
            yield inputs[rows], targets[rows]

    def targets(self, indices: NDArray[np.int64]) -> Tensor:
        """Returns the targets [n, ...] of the samples at ``indices`` [n], on the CPU."""
        return self.batch(indices, torch.device("cpu"))[1]

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
    once. Inputs of other types keep their type. Targets become float32 or, if they are whole numbers, int64.

    Args:
        inputs: [S, ...] inputs; [S, C, H, W] for images.
        targets: [S] integer labels, or [S, ...] targets of any other kind.
        num_train: number of training samples among the S samples; they come first.
        num_classes: number of classes; None if targets are not classes.
        mean: one number per channel (axis 1), subtracted from the (0..1) inputs; requires ``std``.
        std: one number per channel, by which the centred inputs are divided.
        augmentation: changes the raw inputs of training batches.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: NDArray[Any] | Tensor | Sequence[int],
        num_train: int,
        num_classes: int | None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        has_labels = num_classes is not None
        super().__init__(targets if has_labels else None, num_train, num_classes, len(targets))
        self.has_cheap_targets = True
        if len(inputs) != len(self):
            raise ValueError(f"inputs and targets must be of equal length, got {len(inputs)} and {len(self)}")
        self.inputs = as_input(inputs, "inputs").contiguous()
        if not all_finite(self.inputs):
            finite = self.inputs.reshape(len(self.inputs), -1).isfinite().all(dim=1)
            warn_of_gaps(torch.nonzero(~finite).flatten().tolist(), f"{len(self.inputs)} inputs")
        # The targets of `inputs`, in the same order.
        self._targets = as_targets(targets, "targets") if self.labels is None else torch.from_numpy(self.labels)
        self._target_dtype = target_dtype(self._targets)
        self.augmentation = augmentation
        self.most_at_once = CACHED_BYTES // (4 * max(1, self.inputs[0].numel()))
        self._affine = affine_of(self.inputs, mean, std)
        if mean is not None and std is not None:
            self.normalisation = {"mean": list(map(float, mean)), "std": list(map(float, std))}
        elif self.inputs.dtype == torch.uint8:  # others may be normalised already
            channels = self.inputs.shape[1] if self.inputs.ndim > 1 else 1
            self.normalisation = {"mean": [0.0] * channels, "std": [1.0] * channels}
        self._placed: dict[torch.device, tuple[Tensor, Tensor, Affine]] = {}
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
        subset.inputs, subset._targets = self.inputs[torch.from_numpy(indices)], self._targets[indices]
        subset._placed = {}
        return subset

    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Gathers a batch in one step, then converts and normalises it in place."""
        return self._batch(indices, device, None)

    def training_batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Gathers a batch and augments it before it is normalised."""
        return self._batch(indices, device, self.augmentation)

    def targets(self, indices: NDArray[np.int64]) -> Tensor:
        """Looks the targets up without reading any input."""
        return self._targets[self._rows(torch.as_tensor(indices, dtype=torch.int64))].to(self._target_dtype)

    def is_random(self, training: bool) -> bool:
        """Returns True only for training batches that are augmented."""
        return training and self.augmentation is not None

    def pixels(self, inputs: Tensor) -> Tensor:
        """Undoes scale and shift, so that uint8 inputs are in 0..255 again."""
        return unnormalised(inputs, self._affine)

    def _batch(
        self, indices: NDArray[np.int64] | Tensor, device: torch.device, augmentation: Augmentation | None
    ) -> tuple[Tensor, Tensor]:
        inputs, targets, affine = self._place(device)
        row = self._rows(torch.as_tensor(indices, dtype=torch.int64)).to(inputs.device)
        batch = inputs.index_select(0, row).to(device)
        chosen = targets.index_select(0, row).to(device, self._target_dtype)
        if augmentation is not None:
            batch = augmentation(batch)
        return normalised(batch, affine), chosen

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
        """Returns the SHA-256 of inputs, targets, split and normalisation. It is computed once."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            update_digest(digest, self.inputs)
            update_digest(digest, self._targets)
            for coefficient in self._affine or ():
                update_digest(digest, coefficient)
            digest.update(f"{self.num_train}/{self.num_classes}".encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _place(self, device: torch.device) -> tuple[Tensor, Tensor, Affine]:
        """Returns inputs and targets, and scale and shift, on the devices where they are used.

        Inputs and targets are placed where batches are gathered, scale and shift where they are applied. This is done
        once per device.
        """
        if device not in self._placed:
            home = device if self.inputs.nbytes <= RESIDENT_BYTES else torch.device("cpu")
            affine = None if self._affine is None else (self._affine[0].to(device), self._affine[1].to(device))
            self._placed[device] = (self.inputs.to(home), self._targets.to(home), affine)
        return self._placed[device]


def warn_of_gaps(broken: Sequence[int], what: str) -> None:
    """Warns of inputs with NaN or infinity, whose effect looks like that of a learning rate that is too large."""
    if broken:
        warnings.warn(
            f"data.dataset: {len(broken)} of {what} hold NaN or infinity (the first is number {broken[0]}). Models "
            "that learn from them become NaN. Replace these values or drop the samples.",
            stacklevel=3,
        )


def _checked_labels(labels: NDArray[Any] | Tensor | Sequence[int], num_classes: int) -> NDArray[np.int64]:
    array = np.asarray(labels)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        how = "; convert them with .long()" if array.dtype.kind == "b" else ""
        raise ValueError(f"labels must be one integer per sample, got shape {array.shape} of {array.dtype}{how}")
    outside = np.flatnonzero((array < 0) | (array >= num_classes))
    if outside.size:
        raise ValueError(
            f"labels must lie in 0 to {num_classes - 1} (num_classes {num_classes}), got {array.min()} to "
            f"{array.max()} ({outside.size} outside; the first is that of sample {outside[0]}); correct num_classes or "
            "renumber the labels"
        )
    return np.ascontiguousarray(array, dtype=np.int64)


def update_digest(digest: Any, values: Tensor | NDArray[Any]) -> None:
    """Feeds type, shape and content of an array or a dense tensor to the digest.

    Objects are held as pointers, which differ from process to process. So texts, bytes, numbers and None are written
    out, and of an array with any other object only type and shape count.
    """
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        try:
            array = tensor.numpy(force=True)
        except TypeError:  # numpy has no bfloat16 and no float8
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            array = raw_bytes(tensor).numpy()
    else:
        array = values
    digest.update(f"{array.dtype.str}{array.shape}".encode())
    if not array.dtype.hasobject:
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)  # times have no buffer of their own
    elif all(isinstance(each, str | bytes | Number | None) for each in array.flat):
        digest.update(repr(array.ravel().tolist()).encode())
