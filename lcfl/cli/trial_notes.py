"""The note that a sweep leaves beside a trial: the command that ran it, so that no other one goes on with it."""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lcfl.cli.yaml_files import LOADER, SUFFIXES

__all__ = ["check_note", "digest_of", "note_of"]


def note_of(words: Sequence[str], is_shorter: bool) -> dict[str, Any]:
    """Returns the content of a trial's note.

    Args:
        words: the arguments of its command.
        is_shorter: whether the trial has fewer rounds than a run.

    Returns:
        The arguments, with files by name, the files' names and digests, and `is_shorter`.
    """
    known, files = [], dict[str, None]()
    for flag, word in pairwise(["", *words]):
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        is_layer = flag == "-c"
        is_file = os.path.isfile(value) and (is_layer or value.endswith(SUFFIXES))  # not Path.is_file: it may be long
        known.append(option + equals + os.path.basename(value) if is_file else word)
        files |= dict.fromkeys([value] if is_file else [])
        files |= dict.fromkeys(_files_of_groups(value, is_file) if is_layer else [])
    digests = [[os.path.basename(file), digest_of(Path(file))] for file in files]
    return {"command": known, "files": digests, "is_shorter": is_shorter}


def check_note(file: Path, now: dict[str, Any]) -> None:
    """Checks that a trial was begun by the same command. Files may have moved, but not changed.

    Raises:
        ValueError: if another command began it, or if the note is damaged.
    """
    try:
        was = json.loads(file.read_bytes())
        changed = set(was["command"]) ^ set(now["command"])
        changed |= {name for name, _ in set(map(tuple, was["files"])) ^ set(map(tuple, now["files"]))}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"sweep: {file}: damaged ({error}). Remove {file.parent} to run it again.") from None
    if now == {"is_shorter": now["is_shorter"]} | was:  # earlier versions did not say that
        return
    differs = ", ".join(sorted(changed)) or "the order of the words"
    raise ValueError(
        f"sweep: {file.parent} was run by another command; {differs} differs. Give another folder with "
        "--out, or remove this one. A sweep that another version of lcfl began must be finished with that version."
    )


def _files_of_groups(layer: str, is_file: bool) -> list[str]:
    """Returns the files that a layer, a file or a text, names for its groups."""
    with suppress(yaml.YAMLError):  # the parser names the error
        content = yaml.load(Path(layer).read_bytes() if is_file else layer, LOADER)
        if isinstance(content, dict):
            named = [each for each in content.values() if isinstance(each, str) and each.endswith(SUFFIXES)]
            paths = [os.path.join(os.path.dirname(layer) if is_file else "", each) for each in named]
            return [path for path in paths if os.path.isfile(path)]
    return []


def digest_of(file: Path) -> str:
    """Returns the digest of a file's content, hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
