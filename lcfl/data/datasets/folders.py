"""Clients as they lie on a disk: one folder or file for each. Shapes: S samples in all, M clients, C classes."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from lcfl.core.validation import abbreviated, check_instance
from lcfl.data.augmentation import Augmentation
from lcfl.data.conversion import as_targets, target_dtype
from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.datasets.client_files import PartFiles, clients_below, files_at, refuse
from lcfl.data.datasets.readers import Contents, Reader
from lcfl.data.owners import TEST, Owners
from lcfl.data.samples import Samples, TensorSamples

__all__ = ["Folders"]


class Folders(FederatedDataset):
    """One folder per client, ``<root>/<client>``, in which a reader finds the client's samples.

    If the folder holds ``train``, these are the client's training samples, and what ``test`` and ``val`` hold, if they
    exist, is used as such. Each may be a folder or a file, such as ``train.csv``. Otherwise all files below the folder
    are training samples, of which the data module holds out a part. A client may also be a single file,
    ``<root>/<client>.csv``. With the partition `ByOwner` each folder is a client of a run.

    All samples are in memory: first the training and validation samples of all clients, then their test samples.

    Args:
        root: the folder of all clients.
        reader: how files are read: ``ImageFiles``, ``Arrays`` or ``Table``.
        augmentation: changes the inputs of training batches.
        classes: the names of all classes, in the order of their numbers. It is needed where not all clients are read
            together, so that a class has the same number on every machine. Whole numbers stand for their digits. None
            for the sorted classes of the files.

    Raises:
        ValueError: if files are missing, unusable or unlike each other. The message names the client and the file.

    Attributes:
        classes: the names of the classes 0, ..., C - 1; None if targets are not classes.
        columns: the names of a table's features, and of its targets if these are numbers; None if there is no table.
    """

    def __init__(
        self,
        root: str,
        reader: Reader,
        augmentation: Augmentation | None = None,
        classes: Sequence[str | int | bool] | None = None,
    ) -> None:
        check_instance("Folders: reader", reader, Reader)
        self.root, self.reader, self.augmentation = str(root), reader, augmentation
        self._all_classes = None if classes is None else _names(classes)
        clients = clients_below(self.root, reader.suffixes)
        names = tuple(parts[0].client for parts in clients)
        # Training and validation samples of all clients come first. Sorting keeps the order of the clients.
        self._parts: list[PartFiles] = sorted(
            (part for parts in clients for part in parts), key=lambda part: part.part == TEST
        )
        contents = self._open()
        for part, count in zip(self._parts, contents.counts, strict=True):
            if count == 0:
                refuse(part.client, part.folder, f"it has no samples; its files, {abbreviated(part.files)}, are empty")
        place = {name: number for number, name in enumerate(names)}
        number = np.repeat([place[part.client] for part in self._parts], contents.counts)
        role = np.repeat(np.array([part.part for part in self._parts], dtype=np.int8), contents.counts)
        self._owners = Owners(names, number.astype(np.int64), role)
        self._in_files = contents.in_files
        self._contents: Contents | None = contents
        self._mean, self._std = contents.mean, contents.std
        targets = as_targets(contents.targets, "Folders: targets")
        self.shape, self.dtype = contents.shape, contents.dtype
        self.classes, self.columns = contents.classes, contents.columns
        self.num_classes = None if contents.classes is None else len(contents.classes)
        self.target_shape, self.target_dtype = tuple(targets.shape[1:]), target_dtype(targets)
        if augmentation is not None and len(self.target_shape) > 1:
            raise ValueError("Folders: an augmentation changes inputs alone, so these masks would no longer fit")

    def _open(self) -> Contents:
        contents = self.reader.open(self._parts)
        return contents if self._all_classes is None else contents.among(self._all_classes)

    def owners(self, by: str | None = None) -> Owners:
        """Returns the clients, and which of their samples are for training, validation and testing."""
        if by is not None:
            raise ValueError(f"Folders: there is no column {by!r}; the folders are the owners, so leave column out")
        return self._owners

    def place_of(self, index: int) -> tuple[str, int] | None:
        """Returns the file of a sample and its row there, from 1; None if the reader does not say."""
        if self._in_files is None:
            return None
        paths, ends = self._files
        number = int(np.searchsorted(ends, index, side="right"))
        return paths[number], index - int(ends[number] - self._in_files[number]) + 1

    def new_samples(self, path: str) -> tuple[Samples, list[tuple[str, int]]]:
        """Reads samples of any client, with or without targets, by the reader of the data set."""
        own, part = type(self.reader).__name__, files_at(path, self.reader.suffixes)
        inputs, in_files = self.reader.new_inputs(part, self._parts[0])
        if len(in_files) != len(part.files) or sum(in_files) != len(inputs):
            raise ValueError(
                f"{own}.new_inputs: got {len(inputs)} inputs, and the numbers {abbreviated(in_files)} for the "
                f"{len(part.files)} files; return the number of samples of each file."
            )
        places = [(name, row + 1) for name, size in zip(part.paths, in_files, strict=True) for row in range(size)]
        if not places:
            refuse("", path, "it has no samples")
        _, targets = self.spec.blank(len(places))
        samples = TensorSamples(inputs, targets, len(places), self.num_classes, self._mean, self._std)
        first, _ = samples.batch(np.zeros(1, dtype=np.int64), torch.device("cpu"))
        got, wanted = (tuple(first.shape[1:]), first.dtype), (tuple(self.shape), self.dtype)
        if got != wanted:
            words = [f"of the shape {shape} and {str(kind).removeprefix('torch.')}" for shape, kind in (got, wanted)]
            raise ValueError(f"{own}.new_inputs: got inputs {words[0]}; those of the data set are {words[1]}.")
        return samples, places

    @cached_property
    def _files(self) -> tuple[list[str], NDArray[np.int64]]:
        """The files with samples, and the number of samples up to the end of each."""
        assert self._in_files is not None
        return [path for part in self._parts for path in part.paths], np.cumsum(self._in_files)

    def load(self) -> Samples:
        """Reads the inputs. What was read before is kept until then, so that no file is read twice."""
        contents, self._contents = self._contents or self._open(), None
        num_train = int((self._owners.part != TEST).sum())
        return TensorSamples(
            contents.inputs(),
            contents.targets,
            num_train,
            self.num_classes,
            contents.mean,
            contents.std,
            self.augmentation,
        )


def _names(classes: Sequence[str | int | bool]) -> list[str]:
    """Returns the names of classes as texts."""
    if wrong := [name for name in classes if isinstance(name, bool)]:
        raise ValueError(
            f"Folders: classes: got {wrong[0]} as a name; YAML reads yes, no, on, off, true and false so. Write names "
            "in quotes, as in ['no', 'yes']."
        )
    return list(map(str, classes))
