"""Finds the files of each client below a folder, in an order that depends only on their names."""

import os
import posixpath
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lcfl.core.validation import abbreviated
from lcfl.data.names import composed, in_order, spelling
from lcfl.data.owners import TEST, TRAIN, VAL

__all__ = ["PartFiles", "clients_below", "files_at", "refuse"]

PARTS = {"train": TRAIN, "val": VAL, "test": TEST}
PACKED = (".gz", ".bz2", ".xz", ".zip")
# Words in names that probably mean a part: training, test_2023, oak-valid.
LIKE_PARTS = {"train": r"train(ing)?", "val": r"val(id|idation)?", "test": r"test(ing)?"}


@dataclass(frozen=True)
class PartFiles:
    """The files of one part of one client's samples.

    Attributes:
        client: the name of the client; empty if the files belong to none.
        part: ``TRAIN``, ``VAL`` or ``TEST``.
        folder: the folder of the part.
        files: the files below it, as paths with ``/``, in order.
    """

    client: str
    part: int
    folder: str
    files: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        """The paths of the files."""
        return [posixpath.join(self.folder, name) for name in self.files]


def clients_below(root: str, suffixes: tuple[str, ...]) -> list[list[PartFiles]]:
    """Returns the parts of every client: of each folder below a folder, and of each file with one of the suffixes.

    A part is a folder or a file called ``train``, ``val`` or ``test``, in lower or upper case. If a client has
    none of these, all its files are its training samples. Names that begin with a dot are skipped. Clients are sorted
    by name, and by number if all names are whole numbers.

    Args:
        root: the folder.
        suffixes: the ends, in small letters, of the names of files with samples.

    Raises:
        ValueError: if there are no clients, two clients have the same name, a client has no training files, or it is
            not clear what a file or folder belongs to.
    """
    kinds = " or ".join(suffixes)
    try:
        found = _entries(root)
    except OSError as error:
        raise ValueError(
            f"Folders: the folder {root!r} cannot be read ({type(error).__name__}); set data.dataset.init_args.root to "
            f"the folder that holds one folder per client; relative paths begin at {os.getcwd()}"
        ) from error
    clients: dict[str, os.DirEntry[str]] = {}
    known: dict[str, str] = {}
    skipped: list[str] = []
    for entry in found:
        _check_readable(entry, suffixes, "Folders")
        if not (entry.is_dir() or entry.name.lower().endswith(suffixes)):
            skipped.append(entry.name)
            continue
        name = composed(_stem(entry, suffixes))
        other = known.setdefault(spelling(name), name)
        if name in clients or other != name:
            refuse(
                name,
                entry.path,
                f"there is also a client {other!r}; names must differ by more than case and spaces: rename one of them",
            )
        if not name.isprintable():
            refuse(name, entry.path, "a name must be readable text, without line breaks or tabs: rename it")
        clients[name] = entry
    if not clients:
        raise ValueError(
            f"Folders: there are no clients in {root!r}; it must hold one folder, or one file ({kinds}), per client"
        )
    if all(any(re.fullmatch(words, name.casefold()) for words in LIKE_PARTS.values()) for name in clients):
        raise ValueError(
            f"Folders: {root!r} holds {' and '.join(clients)} instead of clients; the order is <client>/train, not "
            "train/<client>. A single client needs a folder around its parts."
        )
    parts = [_parts(name, clients[name], root, suffixes, skipped) for name in in_order(clients)]
    _warn_of_skipped(root, skipped, kinds)
    return parts


def files_at(path: str, suffixes: tuple[str, ...]) -> PartFiles:
    """Returns the file at a path, or all files with one of the suffixes below a folder. They belong to no client.

    Raises:
        ValueError: if there are none.
    """
    if os.path.isdir(path):
        skipped: list[str] = []
        files = _samples("", path, TRAIN, suffixes, skipped)
        _warn_of_skipped(path, skipped, " or ".join(suffixes))
        return PartFiles("", TRAIN, path, files)
    if not os.path.exists(path):
        refuse("", path, f"there is no such file or folder; relative paths begin at {os.getcwd()}")
    if not path.lower().endswith(suffixes):
        refuse("", path, f"the name of a file with samples must end with {' or '.join(suffixes)}")
    folder, name = posixpath.split(path)
    return PartFiles("", TRAIN, folder, (name,))


def refuse(client: str, path: str, problem: str, advice: str = "") -> NoReturn:
    """Raises a ValueError that names the client, if there is one, and the file or folder.

    The `advice` is how else to configure the data set. New samples, which belong to no client, must suit it as it is.
    """
    raise ValueError(f"{_owner(client)}: {path}: {problem}{advice if client else ''}")


def _owner(client: str) -> str:
    return f"Folders: client {client!r}" if client else "Folders"


def _parts(
    client: str, home: os.DirEntry[str], root: str, suffixes: tuple[str, ...], skipped: list[str]
) -> list[PartFiles]:
    """Returns the parts of a client in the order of their numbers, and adds files of other kinds to `skipped`."""
    if not home.is_dir():
        return [PartFiles(client, TRAIN, root, (home.name,))]
    entries: dict[str, os.DirEntry[str]] = {}
    others = []
    for entry in _entries(home.path, client):
        _check_readable(entry, suffixes, _owner(client))
        name = _stem(entry, suffixes).casefold()
        if name not in PARTS:
            others.append(entry)
        elif name in entries:
            refuse(client, entry.path, f"there is also {entries[name].name}; a client has each part once")
        else:
            entries[name] = entry
    if not entries:
        _refuse_like_parts(client, home.path, others, suffixes)
        return [PartFiles(client, TRAIN, home.path, _samples(client, home.path, TRAIN, suffixes, skipped))]
    skipped += [entry.name for entry in others if not entry.is_dir()]
    beside = [entry.name for entry in others if entry.is_dir() or entry.name.lower().endswith(suffixes)]
    if beside:
        refuse(
            client,
            home.path,
            f"it holds {' and '.join(entries)}, and {abbreviated(beside)} beside; a client has only the parts train, "
            "val and test, or none of them: move the others into a part. A class of such a name needs another one.",
        )
    if "train" not in entries:
        refuse(
            client,
            f"{home.path}/train",
            f"it is missing, beside {' and '.join(entries)}; a client needs samples to train on",
        )
    parts = []
    for name, part in PARTS.items():
        if name not in entries:
            continue
        path = entries[name].path
        if entries[name].is_dir():
            parts.append(PartFiles(client, part, path, _samples(client, path, part, suffixes, skipped)))
        else:
            parts.append(PartFiles(client, part, home.path, (entries[name].name,)))
    return [each for each in parts if each.files]


def _refuse_like_parts(client: str, home: str, entries: Iterable[os.DirEntry[str]], suffixes: tuple[str, ...]) -> None:
    """Refuses files or folders that seem to be parts, under names that would make all of them training samples."""
    meant: dict[str, str] = {}
    for entry in entries:
        if entry.is_dir() or entry.name.lower().endswith(suffixes):
            words = re.split(r"[^a-z]+", _stem(entry, suffixes).casefold())
            for part, pattern in LIKE_PARTS.items():
                if any(re.fullmatch(pattern, word) for word in words):
                    meant.setdefault(part, entry.name)
    if "train" in meant and len(meant) > 1:
        refuse(
            client,
            home,
            f"{' and '.join(meant.values())} seem to be parts, whose names must be {' and '.join(meant)}: rename them, "
            "or move them into folders of these names. If all are training samples, move them into a folder train",
        )


def _warn_of_skipped(root: str, skipped: Sequence[str], kinds: str) -> None:
    """Warns of files of other kinds, which may hold samples that are missing then."""
    if skipped:
        number = Counter((os.path.splitext(name)[1] or name).lower() for name in skipped)
        found = abbreviated(
            [f"{count} {kind}" for kind, count in sorted(number.items(), key=lambda each: (-each[1], each[0]))]
        )
        warnings.warn(
            f"Folders: files of other kinds below {root!r} are skipped ({found}); only {kinds} are read.",
            stacklevel=4,
        )


def _check_readable(entry: os.DirEntry[str], suffixes: tuple[str, ...], owner: str) -> None:
    """Refuses compressed files and links to what is gone, which would be skipped silently, and links without an end."""
    name = entry.name.lower()
    may_hold_samples = name.endswith(suffixes) or "." not in name
    if may_hold_samples and entry.is_symlink():
        if not os.path.exists(entry.path):
            raise ValueError(
                f"{owner}: {entry.path}: this link cannot be followed; restore what it leads to, or remove it"
            )
        if entry.is_dir() and Path(entry.path).parent.resolve().is_relative_to(Path(entry.path).resolve()):
            raise ValueError(f"{owner}: {entry.path}: this link leads to a folder around itself; remove it")
    if name.endswith(tuple(suffix + packed for suffix in suffixes for packed in PACKED)) and not entry.is_dir():
        raise ValueError(f"{owner}: {entry.path}: it is compressed; unpack it, or take it out of the folder")


def _samples(client: str, folder: str, part: int, suffixes: tuple[str, ...], skipped: list[str]) -> tuple[str, ...]:
    """Returns the files with samples below a folder. A test or validation part may be empty."""
    names = _names(folder, client, suffixes)
    files = tuple(name for name in names if name.lower().endswith(suffixes))
    if not files and (names or part == TRAIN):
        got = f"; it has {abbreviated(names)}" if names else ""
        refuse(client, folder, f"it has no samples, which are files with {' or '.join(suffixes)}{got}")
    skipped += set(names) - set(files)
    return files


def _names(folder: str, client: str, suffixes: tuple[str, ...]) -> list[str]:
    """Returns all files below a folder, in order, as paths with ``/``."""
    names = []
    for entry in _entries(folder, client):
        _check_readable(entry, suffixes, _owner(client))
        if entry.is_dir():
            names += [f"{entry.name}/{name}" for name in _names(entry.path, client, suffixes)]
        else:
            names.append(entry.name)
    return names


def _entries(folder: str, client: str | None = None) -> list[os.DirEntry[str]]:
    """Returns what a folder holds, sorted by name, without what is hidden."""
    try:
        with os.scandir(folder) as found:
            shown = (entry for entry in found if entry.name[0] != ".")
            return sorted(shown, key=lambda entry: (composed(entry.name), entry.name))
    except OSError as error:
        if client is None:
            raise
        refuse(client, folder, f"it cannot be read ({type(error).__name__})")


def _stem(entry: os.DirEntry[str], suffixes: tuple[str, ...]) -> str:
    """Returns the name of a folder, or that of a file without its suffix."""
    suffix = next((each for each in suffixes if not entry.is_dir() and entry.name.lower().endswith(each)), "")
    return entry.name[: len(entry.name) - len(suffix)]
