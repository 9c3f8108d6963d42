"""The data sets of LEAF, in JSON files as its scripts write them. Shapes: S samples in all, n of one user."""

import json
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lcfl.core.validation import shortened
from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.names import in_order
from lcfl.data.owners import TEST, TRAIN, Owners
from lcfl.data.samples import Samples, TensorSamples

__all__ = ["CHARACTERS", "FEMNIST", "LEAF", "Shakespeare"]

# LEAF's alphabet. The number of a character is its place.
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"

Arrays = tuple[NDArray[Any], NDArray[np.int64]]  # inputs [n, ...] and labels [n]


class LEAF(FederatedDataset):
    """Base class of the data sets of LEAF, whose users are the owners of the samples.

    LEAF's scripts write JSON files with ``users`` and, for each of them, ``user_data`` with lists ``x`` and ``y``.
    `ByOwner` makes each user a client. A user in ``train`` and in ``test`` keeps its test samples. If LEAF has split
    users instead of samples (``-t user``), those in ``test`` have no training samples and become clients only with
    ``data.pool: all``. The numbers in ``num_samples`` are not used, because some scripts of LEAF write wrong ones.

    Args:
        root: the folder that LEAF's scripts have written, with the folders ``train`` and ``test``, or with
            ``all_data`` alone, whose samples are all training samples. They may also lie in ``root/data``.

    Raises:
        ValueError: if a file is not of this form, a user is in two files of one folder or has no samples, or a sample
            is unusable. The message names file and user.
    """

    _folder: ClassVar[str]  # in LEAF's repository

    def __init__(self, root: str) -> None:
        self.root = root
        self._name = type(self).__name__
        self._arrays: Arrays | None = None
        self._owners: Owners | None = None

    def prepare(self) -> None:
        """Verifies that there are files with training samples."""
        self._files()

    def owners(self, by: str | None = None) -> Owners:
        """Returns the users. All files are read for it, once, and `load` uses what was read."""
        if by is not None:
            raise ValueError(f"{self._name}: there is no column {by!r}; leave column out, because users are the owners")
        if self._owners is None:
            self._read()
        assert self._owners is not None
        return self._owners

    def load(self) -> Samples:
        """Returns the training samples, then the test samples, each in the order of files and users."""
        if self._arrays is None:
            self._read()
        assert self._arrays is not None and self._owners is not None
        (inputs, labels), self._arrays = self._arrays, None  # not kept twice
        num_train = int((self._owners.part == TRAIN).sum())
        return TensorSamples(torch.from_numpy(inputs), labels, num_train, self.num_classes)

    @abstractmethod
    def _inputs(self, x: Any) -> NDArray[Any]:
        """Returns the inputs [n, ...] of one user. Raises a ValueError that ends the sentence "x of user u ..."."""

    @abstractmethod
    def _labels(self, y: list[Any]) -> NDArray[np.int64]:
        """Returns the labels [n] of one user. Raises a ValueError that ends the sentence "y of user u ..."."""

    def _joined(self, inputs: list[NDArray[Any]]) -> NDArray[Any]:
        """Returns the inputs [S, ...] of all users."""
        return np.concatenate(inputs)

    def _files(self) -> dict[str, list[Path]]:
        """Returns the files with training samples, and those with test samples."""
        for folder in (Path(self.root), Path(self.root, "data")):
            found = {part: sorted((folder / part).glob("*.json")) for part in ("train", "test", "all_data")}
            if found["train"]:
                return {"train": found["train"], "test": found["test"]}
            if found["all_data"] and not found["test"]:
                return {"train": found["all_data"], "test": []}
        raise FileNotFoundError(
            f"{self._name}: there is no file train/*.json or all_data/*.json under {self.root!r} "
            "(data.dataset.init_args.root). LEAF's script preprocess.sh makes these files: clone the repository "
            f"TalwalkarLab/leaf of GitHub, run data/{self._folder}/preprocess.sh there, and set root to "
            f"leaf/data/{self._folder}/data."
        )

    def _read(self) -> None:
        """Reads all files, one at a time."""
        inputs: list[NDArray[Any]] = []
        labels: list[NDArray[np.int64]] = []
        owners: list[tuple[str, int]] = []  # user and part, for each list of samples
        for part, paths in self._files().items():
            seen: dict[str, Path] = {}
            for path in paths:
                for user, data in self._users(path):
                    if user in seen:
                        raise ValueError(
                            f"{self._name}: user {user!r} is in {str(seen[user])!r} and in {str(path)!r}; two clients "
                            "cannot have one name. Remove files that an earlier run of preprocess.sh has left, or "
                            "rename the user."
                        )
                    seen[user] = path
                    x, y = self._user(path, user, data, may_be_empty=part == "test")
                    inputs.append(x)
                    labels.append(y)
                    owners.append((user, TEST if part == "test" else TRAIN))
        if not any(part == TRAIN for _, part in owners):
            raise ValueError(f"{self._name}: the files under {self.root!r} have no users with training samples")
        names = tuple(in_order({user for user, _ in owners}))
        place = {user: number for number, user in enumerate(names)}
        sizes = [len(each) for each in labels]
        number = np.repeat(np.array([place[user] for user, _ in owners]), sizes)
        parts = np.repeat(np.array([part for _, part in owners], dtype=np.int8), sizes)
        self._owners = Owners(names, number, parts)
        self._arrays = self._joined(inputs), np.concatenate(labels)

    def _users(self, path: Path) -> Iterator[tuple[str, Any]]:
        """Yields the users of a file with their data, and forgets the data of each user after it was yielded."""
        where = f"{self._name}: {str(path)!r}"
        try:
            content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=self._object)
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{where} cannot be read as JSON: {shortened(str(error), 300)}") from error
        users, data = (content.get(key) if isinstance(content, dict) else None for key in ("users", "user_data"))
        if not isinstance(users, list) or not isinstance(data, dict):
            raise ValueError(f"{where} must hold an object with a list 'users' and an object 'user_data', as LEAF's do")
        del content
        for user in map(str, users):
            if not user.strip():
                raise ValueError(f"{where} has a user without a name in 'users'; name it there and in 'user_data'")
            if user not in data:
                raise ValueError(f"{where} has user {user!r} in 'users', but not in 'user_data' (or twice in 'users')")
            yield user, data.pop(user)
        # LEAF leaves users that are too small to be split in user_data, without samples.
        unlisted = [user for user, own in data.items() if not isinstance(own, dict) or len(own.get("y") or ())]
        if unlisted:
            raise ValueError(f"{where} has user {unlisted[0]!r} in 'user_data', but not in 'users'; add it there")

    def _user(self, path: Path, user: str, data: Any, may_be_empty: bool) -> Arrays:
        """Returns inputs and labels of one user."""
        where = f"of user {user!r} in {str(path)!r}"
        x, y = (data.get(key) if isinstance(data, dict) else None for key in ("x", "y"))
        if not isinstance(x, list | np.ndarray) or not isinstance(y, list):
            found = ", ".join(map(str, data)) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"{self._name}: the data {where} must have a list 'x' and a list 'y', got {found}")
        if len(x) != len(y):
            raise ValueError(f"{self._name}: x and y {where} must be of equal length, got {len(x)} and {len(y)}")
        if len(y) == 0 and not may_be_empty:
            raise ValueError(f"{self._name}: there are no samples {where}; remove the user or give it samples")
        try:
            name = "x"
            inputs = self._inputs(x)
            name = "y"
            return inputs, self._labels(y)
        except ValueError as error:
            raise ValueError(f"{self._name}: {name} {where} {error}") from None

    @staticmethod
    def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Returns a JSON object, with numbers in arrays as soon as a user is read: lists need four times the memory."""
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{twice!r} is in it twice; two clients cannot have one name")
        x = made.get("x")
        if isinstance(x, list) and x and isinstance(x[0], list):
            with suppress(TypeError, ValueError):  # of unequal lengths or without numbers, which `_inputs` refuses
                made["x"] = np.array(x, dtype=np.float64)
        return made


class FEMNIST(LEAF):
    """FEMNIST of LEAF: handwritten digits and letters, 1 x 28 x 28, of 62 classes. Each user is a writer.

    Classes 0 to 9 are digits, 10 to 35 capital and 36 to 61 small letters. Inputs are in 0..1 and, as in LEAF's files,
    not inverted: the paper is 1 and the ink is 0, whereas in `EMNIST` the paper is 0 and the ink is 1.

    Args:
        root: the folder that LEAF's scripts have written, see `LEAF`.
        invert: whether to make the paper 0 and the ink 1, as in `EMNIST`.
    """

    shape, num_classes = (1, 28, 28), 62
    _folder = "femnist"

    def __init__(self, root: str = "data/femnist", invert: bool = False) -> None:
        super().__init__(root)
        self.invert = invert

    def _inputs(self, x: Any) -> NDArray[Any]:
        images = np.zeros((0, 784)) if len(x) == 0 else x
        if not isinstance(images, np.ndarray) or images.shape[1:] != (784,):
            got = f"shape {list(images.shape[1:])}" if isinstance(images, np.ndarray) else "something else"
            raise ValueError(f"must be lists of 784 numbers, got {got}")
        if not np.isfinite(images).all():
            raise ValueError(f"holds NaN or infinity in sample {np.flatnonzero(~np.isfinite(images).all(axis=1))[0]}")
        if images.min(initial=0) < 0 or images.max(initial=0) > 1:
            raise ValueError(f"must lie in 0 to 1, got {images.min():g} to {images.max():g}; divide pixels by 255")
        images = (1 - images if self.invert else images).reshape(-1, *self.shape)
        pixels = np.rint(255 * images)
        is_exact = np.abs(255 * images - pixels).max(initial=0) < 1e-3  # LEAF divides bytes by 255
        return pixels.astype(np.uint8) if is_exact else images.astype(np.float32)

    def _labels(self, y: list[Any]) -> NDArray[np.int64]:
        for label in y:
            if type(label) is not int or not 0 <= label < 62:
                raise ValueError(f"must be whole numbers from 0 to 61, got {label!r}")
        return np.array(y, dtype=np.int64)

    def _joined(self, inputs: list[NDArray[Any]]) -> NDArray[Any]:
        if all(each.dtype == np.uint8 for each in inputs):
            return np.concatenate(inputs)
        return np.concatenate([each / np.float32(255) if each.dtype == np.uint8 else each for each in inputs])


class Shakespeare(LEAF):
    """Shakespeare of LEAF: the next character after 80 characters. Each user is a role in a play.

    An input is the int64 numbers [80] of characters, their places in `CHARACTERS`, and the label is the number of the
    next one. LEAF's own programs count every character outside of this alphabet as the last one, without a word.

    Args:
        root: the folder that LEAF's scripts have written, see `LEAF`.
        unknown: what to do with a character outside of the alphabet, such as a curly quote of a newer edition of the
            text: ``refuse`` it, or make all of them one more class (``class``), number 80, so that there are 81.

    Raises:
        ValueError: if `unknown` is something else, see also `LEAF`.
    """

    shape, num_classes, dtype = (80,), len(CHARACTERS), torch.int64
    _folder = "shakespeare"

    def __init__(self, root: str = "data/shakespeare", unknown: Literal["refuse", "class"] = "refuse") -> None:
        super().__init__(root)
        self.unknown = unknown
        self.num_classes = len(CHARACTERS) + (unknown == "class")

    def _inputs(self, x: Any) -> NDArray[np.int64]:
        for number, text in enumerate(x):
            if not isinstance(text, str) or len(text) != 80:
                got = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
                raise ValueError(f"must be texts of 80 characters, got {got} in sample {number}")
        return self._numbers("".join(x)).reshape(-1, 80)

    def _labels(self, y: list[Any]) -> NDArray[np.int64]:
        for label in y:
            if not isinstance(label, str) or len(label) != 1:
                raise ValueError(f"must be single characters, got {label!r:.40}")
        return self._numbers("".join(y))

    def _numbers(self, text: str) -> NDArray[np.int64]:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        numbers = NUMBER_OF[np.minimum(codes, len(NUMBER_OF) - 1)]
        if self.unknown == "refuse" and numbers.max(initial=0) == len(CHARACTERS):
            character = chr(codes[numbers == len(CHARACTERS)][0])
            raise ValueError(
                f"holds the character {character!r}, which is not in LEAF's alphabet of {len(CHARACTERS)}; set unknown "
                "to class, which makes such characters one more class"
            )
        return numbers


# Number of each character of ASCII, and in the last place of all others.
NUMBER_OF = np.full(129, len(CHARACTERS), dtype=np.int64)
NUMBER_OF[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))
