"""The samples of a map-style data set, which are read item by item."""

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lcfl.core import rng
from lcfl.core.messages import all_finite
from lcfl.data.conversion import as_integers, check_map_style, evenly_spaced, read_item, target_dtype
from lcfl.data.normalisation import affine_of, normalised, unnormalised
from lcfl.data.samples import Samples, update_digest, warn_of_gaps

__all__ = ["DatasetSamples"]


class DatasetSamples(Samples):
    """Any map-style ``Dataset`` of (input, target) pairs, read item by item with its own transforms.

    Inputs may be anything that `lcfl.data.conversion.as_input` accepts. They must all have one shape and type. uint8
    inputs are scaled to 0..1. Labels are read once. They come from an attribute ``targets`` or ``labels`` if it holds
    one integer per item, no ``target_transform`` changes it and it agrees with the inspected items. Otherwise every
    item is read for its label. Targets that are not classes are read with their inputs, so a transform of the data set
    may change both alike.

    Args:
        train: the training samples.
        test: the official test samples, if there are any.
        num_classes: number of classes; None if targets are not classes.
        source: the class that the user has named, for messages.

    Raises:
        ValueError: if a data set is not map-style or is empty, an item is not a pair, or an input or a target is
            unusable or unlike the first one. The message names the item.
    """

    def __init__(
        self, train: Dataset[Any], test: Dataset[Any] | None, num_classes: int | None, source: str = "Datasets"
    ) -> None:
        self._source = source
        self._parts: dict[str, Any] = {"train": train} if test is None else {"train": train, "test": test}
        for part in self._parts.values():
            check_map_style(part)
        self._has_labels = num_classes is not None
        # Random transforms run here too, and their draws must not advance the caller's generators.
        with rng.seeded(0, "read items"):
            self._first, self._first_target = read_item(train, "train", 0, self._has_labels, source)
            labels = [self._labels(name) for name in self._parts]
        total = sum(map(len, self._parts.values()))
        known = np.concatenate([each for each in labels if each is not None]) if self._has_labels else None
        super().__init__(known, len(self._parts["train"]), num_classes, total)
        self._affine = affine_of(self._first.unsqueeze(0), None, None)
        self._fingerprint: str | None = None

    def batch(self, indices: NDArray[np.int64] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Reads the items and returns their stacked inputs, and their targets."""
        index = np.asarray(indices)
        items = [self._read(*self._position(int(number))) for number in index]
        inputs = torch.stack([each for each, _ in items]).to(device)
        if self.labels is None:
            targets = torch.stack([each for _, each in items])
        else:
            targets = torch.from_numpy(self.labels[index])
        return normalised(inputs, self._affine), targets.to(device, target_dtype(targets))

    def targets(self, indices: NDArray[np.int64]) -> Tensor:
        """Looks labels up; reads the items for other targets."""
        if self.labels is None:
            return super().targets(indices)
        return torch.from_numpy(self.labels[indices])

    def pixels(self, inputs: Tensor) -> Tensor:
        """Undoes the scaling of uint8 inputs. Changes by the data set's own transforms stay."""
        return unnormalised(inputs, self._affine)

    def fingerprint(self) -> str:
        """Returns the SHA-256 of labels, split, class names, raw ``data`` or ``tensors`` and a selection of items.

        Sparse tensors are left out. It is computed once. Each item is read in a separate random stream, so random
        transforms give equal items every time. This fails for a data set that draws from a private generator: its items
        are left out, with a warning.
        """
        if self._fingerprint is None:
            digest = hashlib.sha256(f"{self.num_train}/{self.num_classes}".encode())
            if self.labels is not None:
                update_digest(digest, self.labels)
            for name, part in self._parts.items():
                digest.update(f"{type(part).__module__}.{type(part).__qualname__}".encode())
                tensors = getattr(part, "tensors", None)
                for raw in (getattr(part, "data", None), *(() if tensors is None else tensors)):
                    if isinstance(raw, np.ndarray) or (isinstance(raw, Tensor) and raw.layout == torch.strided):
                        update_digest(digest, raw)
                digest.update(self._digest_of_items(name))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _digest_of_items(self, name: str) -> bytes:
        """Returns the SHA-256 of a selection of a part's items, or nothing if a second reading gives other items."""
        once, again = hashlib.sha256(), hashlib.sha256()
        for digest in (once, again):
            for index in evenly_spaced(len(self._parts[name])):
                with rng.seeded(0, "fingerprint", index):
                    inputs, target = self._read(name, index)
                update_digest(digest, inputs)
                if not self._has_labels:
                    update_digest(digest, target)
        if once.digest() == again.digest():
            return once.digest()
        warnings.warn(
            f"data.dataset: {self._source}: items of {name} differ from one reading to the next. A resumed run will "
            "therefore not be bit-identical, and lcfl does not compare the items when it resumes. Let random "
            "transforms draw from the global generator of torch, numpy or Python, which lcfl seeds for every "
            "client and round.",
            stacklevel=2,
        )
        return b""

    def _labels(self, name: str) -> NDArray[Any] | None:
        """Returns the labels of a part; None if targets are not classes.

        It reads a selection of the part's items, and all if no attribute has their labels.
        """
        part, inspected = self._parts[name], evenly_spaced(len(self._parts[name]))
        seen, broken = self._inspect(name, inspected)
        labels: NDArray[Any] | None = None
        if not self._has_labels:
            warn_of_gaps(broken, f"{len(inspected)} inspected items of {name}")
            return None
        untransformed = getattr(part, "target_transform", None) is None
        for attribute in ("targets", "labels") if untransformed else ():
            labels = as_integers(getattr(part, attribute, None))
            if (
                labels is not None
                and labels.shape == (len(part),)
                and labels[inspected].tolist() == list(map(int, seen))
            ):
                break
        else:
            inspected = list(range(len(part)))
            seen, broken = self._inspect(name, inspected)
            labels = np.array([int(each) for each in seen], dtype=np.int64)
        warn_of_gaps(broken, f"{len(inspected)} inspected items of {name}")
        return labels

    def _inspect(self, name: str, indices: Sequence[int]) -> tuple[list[Tensor], list[int]]:
        """Reads items. Returns their targets, and the indices of those whose input holds NaN or infinity."""
        targets, broken = [], []
        for index in indices:
            inputs, target = self._read(name, index)
            targets.append(target)
            if not all_finite(inputs):
                broken.append(index)
        return targets, broken

    def _read(self, name: str, index: int) -> tuple[Tensor, Tensor]:
        """Reads an item and checks that shapes and types are those of the first item."""
        inputs, target = read_item(self._parts[name], name, index, self._has_labels, self._source)
        if inputs.shape != self._first.shape or inputs.dtype != self._first.dtype:
            raise ValueError(
                f"{self._source}: item {index} of {name} has an input of shape {tuple(inputs.shape)} and type "
                f"{inputs.dtype}, but item 0 of train has shape {tuple(self._first.shape)} and type "
                f"{self._first.dtype}; all inputs must have the same shape and type: resize, crop or pad them in the "
                "data set's transform"
            )
        if target.shape != self._first_target.shape or target.dtype != self._first_target.dtype:
            raise ValueError(
                f"{self._source}: item {index} of {name} has a target of shape {tuple(target.shape)} and type "
                f"{target.dtype}, but item 0 of train has shape {tuple(self._first_target.shape)} and type "
                f"{self._first_target.dtype}; all targets must have the same shape and type"
            )
        return inputs, target

    def _position(self, index: int) -> tuple[str, int]:
        """Returns the part that an index belongs to, and the position in that part."""
        return ("train", index) if index < self.num_train else ("test", index - self.num_train)
