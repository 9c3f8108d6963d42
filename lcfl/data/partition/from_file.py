"""A partition read from a file, and the function that writes such a file."""

import json
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lcfl.core.files import read_regular, write_json
from lcfl.data.partition.base import ClientShares, Indices, Partition, Pool

__all__ = ["FromFile", "write_partition"]


@dataclass(frozen=True)
class FromFile(Partition):
    """Reads a partition that was made by another framework, by `write_partition` or by a run (``partition.json``).

    Args:
        path: JSON file ``{"indices": [[...], ...], "groups": [...] or null}`` with one list of sample indices per
            client. Indices count the training samples first, then the official test samples (``pool: all``). With
            ``"overlapping": true`` an index may belong to several clients. ``"names": [...]`` gives clients names.
            ``own_val`` and ``own_test`` are lists like ``indices``: which of its indices a client keeps for
            validation, and its own test samples outside the pool. Other keys are ignored.
    """

    path: str

    def split(self, pool: Pool, num_clients: int, generator: np.random.Generator) -> ClientShares:
        """Reads the shares from the file and draws nothing."""
        content = self._content()
        indices = [self._integers(f"indices[{client}]", share) for client, share in enumerate(content["indices"])]
        groups, names = content.get("groups"), content.get("names")
        overlapping = content.get("overlapping", False)
        if not isinstance(overlapping, bool):
            raise ValueError(f"FromFile: overlapping in {self.path!r} must be true or false, got {overlapping!r}")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError(f"FromFile: names in {self.path!r} must be a list of texts, one per client")
        groups = None if groups is None else self._integers("groups", groups)
        own = {part: self._lists(part, content.get(f"own_{part}")) for part in ("val", "test")}
        return ClientShares(indices, groups, overlapping, None if names is None else tuple(names), **own)

    def _lists(self, part: str, lists: Any) -> list[Indices] | None:
        return None if lists is None else [self._integers(f"own_{part}[{n}]", own) for n, own in enumerate(lists)]

    def num_clients(self, pool: Pool) -> int:
        """Returns the number of clients in the file."""
        return len(self._content()["indices"])

    def _content(self) -> dict[str, Any]:
        try:
            content = json.loads(read_regular(Path(os.path.realpath(self.path))))
        except FileNotFoundError as error:
            raise ValueError(f"FromFile: there is no file {self.path!r}; give the path of a partition file") from error
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"FromFile: {self.path!r} cannot be read as JSON: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("indices"), list):
            raise ValueError(f"FromFile: {self.path!r} must hold an object with a list 'indices', one entry per client")
        return content

    def _integers(self, key: str, values: Any) -> Indices:
        # In Python a bool is an int, but true is not an index.
        wrong = [values] if not isinstance(values, list) else [value for value in values if type(value) is not int]
        if wrong:
            got = textwrap.shorten(json.dumps(wrong[0]), 40, placeholder="...")
            raise ValueError(f"FromFile: {key} in {self.path!r} must be a list of integers, got {got}")
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError as error:
            raise ValueError(f"FromFile: {key} in {self.path!r} holds a number beyond 64 bits") from error


def write_partition(path: str | Path, shares: ClientShares) -> None:
    """Writes ``shares`` to a file that `FromFile` can read. An existing file is replaced as a whole."""
    groups = None if shares.groups is None else shares.groups.tolist()
    indices = [share.tolist() for share in shares.indices]
    more: dict[str, Any] = {} if shares.names is None else {"names": list(shares.names)}
    for part, lists in {"own_val": shares.val, "own_test": shares.test}.items():
        more |= {} if lists is None else {part: [own.tolist() for own in lists]}
    write_json(path, {"indices": indices, "groups": groups, "overlapping": shares.overlapping} | more)
