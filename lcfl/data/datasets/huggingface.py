"""Data sets of Hugging Face's library ``datasets``. Shapes: S samples in all."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core import rng
from lcfl.core.validation import shortened
from lcfl.data.conversion import as_input, as_targets, network_dtype, target_dtype
from lcfl.data.dataset_samples import DatasetSamples
from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.datasets.huggingface_columns import Items, check_columns, class_names, column_values, numbers, tokens
from lcfl.data.owners import VAL, Owners
from lcfl.data.samples import Samples, TensorSamples

__all__ = ["HuggingFace"]


class HuggingFace(FederatedDataset):
    """A data set of Hugging Face's library ``datasets``, whose columns become inputs, targets and owners.

    `ByOwner` with a ``column`` makes each owner that this column names a client.

    - Columns of numbers, of arrays of one shape and of images of one size are read once and kept in memory. Bytes and
      images are scaled to 0..1, and other whole numbers keep their type.
    - With a `tokenizer`, the texts of one column become int64 numbers [max_length], also once.
    - With a `transform`, items are read when they are needed, so a data set may be larger than the memory, and random
      transforms may draw from the global generators of torch, numpy and Python.

    Args:
        path: a folder that ``save_to_disk`` has written, the name of a data set on the Hub, a folder of files that
            ``load_dataset`` understands, or, from Python, a ``Dataset`` or ``DatasetDict``.
        inputs: the column with the inputs. Several columns of numbers are stacked to one vector of float32.
        target: the column with the targets. Those of type ``ClassLabel`` are classes. Several columns of numbers are
            stacked to one vector of float32.
        train: the split with the training samples; unused if the data set has no splits.
        test: the split with the official test samples; None for none.
        val: a split whose samples are added to the training samples. `ByOwner` keeps them for validation.
        subset: which configuration of a data set on the Hub to load, if it has several.
        num_classes: number of classes, if the target is a whole number without names; None for the number of names, or
            for targets that are not classes.
        transform: makes an input of the value in the column, or of a dict of several columns.
        tokenizer: makes a list of whole numbers of a text, or a dict with such a list as ``input_ids``.
        max_length: number of tokens of each text. Longer texts are cut, and shorter ones filled up with `padding`.
        padding: the number that stands for no token.

    Raises:
        ModuleNotFoundError: if the library is not installed.
        FileNotFoundError: if there is no such data set, or it cannot be downloaded.
        ValueError: if a split or column is missing, the data set is streamed, a value is unusable, or splits number
            their classes differently.
    """

    def __init__(
        self,
        path: Any,
        inputs: str | list[str],
        target: str | list[str],
        train: str = "train",
        test: str | None = None,
        val: str | None = None,
        subset: str | None = None,
        num_classes: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        tokenizer: Callable[[str], Any] | None = None,
        max_length: int | None = None,
        padding: int = 0,
    ) -> None:
        self._inputs = [inputs] if isinstance(inputs, str) else list(inputs)
        self._target = [target] if isinstance(target, str) else list(target)
        if not self._inputs or not self._target:
            raise ValueError("HuggingFace: inputs and target must name at least one column each")
        self._transform, self._tokenizer, self._padding = transform, tokenizer, padding
        self._max_length = max_length or 0
        self._check_tokenizer(max_length)
        self._parts = _splits(_opened(path, subset), {"train": train, "val": val, "test": test})
        self._names = {"train": train, "val": val, "test": test}
        for name, part in self._parts.items():
            check_columns(part, str(self._names[name]), [*self._inputs, *self._target])
        named = self._class_names() if len(self._target) == 1 else None
        if named is not None and num_classes not in (None, len(named)):
            raise ValueError(
                f"HuggingFace: column {self._target[0]!r} has {len(named)} classes ({', '.join(named[:5])}, ...), but "
                f"num_classes is {num_classes}; leave it out"
            )
        self.num_classes = num_classes if named is None else len(named)
        self.classes = None if named is None else tuple(named)
        first = {"train": self._parts["train"].select([0])}
        inputs_of_first, targets_of_first = self._read(first)
        self.shape, self.dtype = tuple(inputs_of_first.shape[1:]), network_dtype(inputs_of_first)
        self.target_shape, self.target_dtype = tuple(targets_of_first.shape[1:]), target_dtype(targets_of_first)

    def load(self) -> Samples:
        """Returns the training samples, with `val` its samples, then the test samples."""
        sizes = {name: len(part) for name, part in self._parts.items()}
        num_train = sum(sizes.values()) - sizes.get("test", 0)
        if self._transform is None:
            inputs, targets = self._read(self._parts)
            return TensorSamples(inputs, targets, num_train, self.num_classes)
        join = _library().concatenate_datasets
        held = {"train": [self._parts[name] for name in ("train", "val") if name in self._parts]}
        held |= {"test": [self._parts["test"]]} if "test" in self._parts else {}
        joined = {name: join(parts) for name, parts in held.items()}
        items = {name: self._items(name, part) for name, part in joined.items()}
        return DatasetSamples(items["train"], items.get("test"), self.num_classes, source="HuggingFace")

    def owners(self, by: str | None = None) -> Owners | None:
        """Returns the owners that the column `by` names."""
        if by is None:
            return None
        columns = {name: column_values(part, str(self._names[name]), by) for name, part in self._parts.items()}
        values = [value for column in columns.values() for value in column]
        num_test = len(columns.get("test", ()))
        owners = Owners.of_column(values, len(values) - num_test)
        part = owners.part.copy()
        start = len(columns["train"])
        part[start : start + len(columns.get("val", ()))] = VAL
        return replace(owners, part=part)

    def _class_names(self) -> list[str] | None:
        """Returns the names of the classes, which the splits must number in one way; None if they have none."""
        column = self._target[0]
        names = class_names(self._parts["train"], column)
        for name, part in self._parts.items():
            own = class_names(part, column)
            if names is None or own is None or own == names:
                continue
            number, (one, other) = next((n, pair) for n, pair in enumerate(zip_longest(names, own)) if len({*pair}) > 1)
            raise ValueError(
                f"HuggingFace: class {number} of column {column!r} is {one!r} in {self._names['train']}, but {other!r} "
                f"in {self._names[name]}; number the classes alike in all splits with align_labels_with_mapping, or "
                f"make them of texts with cast_column({column!r}, ClassLabel(names=[...])) for all splits"
            )
        return names

    def _read(self, parts: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Reads inputs [S, ...] and targets [S, ...] of splits."""
        inputs, targets = [], []
        for name, part in parts.items():
            split = str(self._names[name])
            if self._tokenizer is not None:
                size, padding = self._max_length, self._padding
                inputs.append(tokens(part, split, self._inputs[0], self._tokenizer, size, padding))
            elif self._transform is None:
                inputs.append(numbers(part, split, self._inputs, is_input=True))
            else:
                with rng.seeded(0, "read items"):
                    one = self._items(name, part)[0][0]
                inputs.append(as_input(one, f"HuggingFace: what transform makes of row 0 of {split}").numpy()[None])
            targets.append(self._targets(split, part))
        for kind, arrays in {"inputs": inputs, "targets": targets}.items():
            if len({(each.shape[1:], each.dtype) for each in arrays}) > 1:
                found = ", ".join(
                    f"{name}: {list(each.shape[1:])} of {each.dtype}" for name, each in zip(parts, arrays, strict=True)
                )
                raise ValueError(f"HuggingFace: {kind} of all splits must have one shape and type, got {found}")
        return (
            as_input(np.concatenate(inputs), "HuggingFace: inputs"),
            as_targets(np.concatenate(targets), "HuggingFace: targets"),
        )

    def _targets(self, split: str, part: Any) -> NDArray[Any]:
        """Returns the targets [n, ...] of a split."""
        targets = numbers(part, split, self._target, is_input=False)
        if self.num_classes is not None and (targets.ndim != 1 or targets.dtype.kind not in "iu"):
            raise ValueError(
                f"HuggingFace: target {', '.join(self._target)} of {split} must be the number of a class, because "
                f"there are num_classes; got {targets.dtype} of shape {list(targets.shape[1:])}"
            )
        return targets

    def _items(self, name: str, part: Any) -> Any:
        assert self._transform is not None
        return Items(part, self._inputs, self._transform, self._targets(str(self._names[name]), part))

    def _check_tokenizer(self, max_length: int | None) -> None:
        if self._tokenizer is None and max_length is not None:
            raise ValueError("HuggingFace: max_length is only for a tokenizer; set tokenizer, or leave max_length out")
        if self._tokenizer is None:
            return
        if self._transform is not None or len(self._inputs) > 1:
            raise ValueError(
                "HuggingFace: a tokenizer reads one column, without a transform; use a transform that does both"
            )
        if max_length is None or max_length < 1:
            raise ValueError(
                f"HuggingFace: a tokenizer needs max_length, the number of tokens of every input; got {max_length}"
            )


def _library() -> ModuleType:
    try:
        return import_module("datasets")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "HuggingFace: the package datasets is not installed; pip install 'lcfl[huggingface]'"
        ) from error


def _opened(path: Any, subset: str | None) -> Any:
    """Returns a ``Dataset`` or ``DatasetDict``."""
    library = _library()
    if isinstance(path, library.IterableDataset | library.IterableDatasetDict):
        raise ValueError(
            "HuggingFace: got a streamed data set (IterableDataset), which cannot be read by position; load it with "
            "streaming=False, or save a part of it with save_to_disk"
        )
    if isinstance(path, library.Dataset | library.DatasetDict):
        return path
    if not isinstance(path, str | Path):
        raise ValueError(f"HuggingFace: path must be a folder or the name of a data set, got {path!r:.80}")
    folder = Path(path)
    is_saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        return library.load_from_disk(str(path)) if is_saved else library.load_dataset(str(path), subset)
    # The library raises errors of many kinds: of the network, of the file system, of its own.
    except Exception as error:
        raise FileNotFoundError(
            f"HuggingFace: {str(path)!r} (data.dataset.init_args.path) is not a folder that save_to_disk has written, "
            f"and load_dataset cannot load it ({type(error).__name__}: {shortened(str(error), 300)}). Give such a "
            "folder, or a name on the Hub and a network; load_dataset(name).save_to_disk(folder) makes one of the other"
        ) from error


def _splits(found: Any, wanted: dict[str, str | None]) -> dict[str, Any]:
    """Returns the splits by their role: train, then val and test if they are wanted."""
    named = {role: name for role, name in wanted.items() if name is not None}
    if not hasattr(found, "keys"):
        if len(named) > 1:
            *_, role = named
            raise ValueError(
                f"HuggingFace: this data set has no splits, so {role} cannot be {named[role]!r}; leave it out"
            )
        return {"train": found}
    for role, name in named.items():
        if name not in found:
            raise ValueError(f"HuggingFace: there is no split {name!r} ({role}); the splits are {', '.join(found)}")
    if len(set(named.values())) < len(named):
        raise ValueError(f"HuggingFace: one split cannot be two of train, val and test; got {named}")
    return {role: found[name] for role, name in named.items()}
