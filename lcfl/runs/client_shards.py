"""The clients' states in a checkpoint: written in shards, which checkpoints share by hard links.

A checkpoint writes the states of the clients that have changed since the one before it into new shards and links the
old ones. States in a shard that are out of date are passed over, and a shard of which less than half is still current
is written anew. So a checkpoint costs what has changed, at most twice that on average, and takes at most twice the
room.
"""

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lcfl.core.clients import VECTORS, ClientState, ClientStore
from lcfl.core.files import write_bytes
from lcfl.core.shard_index import CheckpointShard
from lcfl.runs.serialization import serialized

__all__ = ["current_clients", "shard_states", "stamp_of", "write_shards"]

SHARD_BYTES = 8 * 2**20


def write_shards(folder: Path, store: ClientStore, earlier: Sequence[Path]) -> list[CheckpointShard]:
    """Links the shards that are still of use from `earlier` checkpoints, and writes new ones of all other states."""
    for shard in store.shards:
        # It is not read again; one that somebody has touched since is written anew.
        untouched = functools.partial(_is_untouched, stamp=shard.stamp)
        if not (shard.is_half_current and _linked(folder / shard.name, earlier, untouched)):
            store.shards.release(shard)
    for clients in _portions(store):
        content = serialized(_shard(clients, store))
        digest = hashlib.sha256(content).hexdigest()
        file = folder / f"clients-{clients[0]:06d}-{digest[:16]}.pt"
        equal = functools.partial(_has_content, content=content)  # as of a state that another process has saved here
        if not _linked(file, earlier, equal):
            write_bytes(file, content)
        store.shards.saved(CheckpointShard(file.name, digest, stamp_of(file), len(clients), set(clients)))
    return list(store.shards)


def _portions(store: ClientStore) -> Iterator[list[int]]:
    """The clients whose states are to be written, ascending, cut into shards by the bytes of their vectors."""
    clients: list[int] = []
    num_bytes = 0
    for client in sorted(store.shards.unsaved):
        vectors = [getattr(store[client], name) for name in VECTORS]
        size = 16 + sum(vector.nbytes for vector in vectors if vector is not None)
        if clients and num_bytes + size > SHARD_BYTES:
            yield clients
            clients, num_bytes = [], 0
        clients.append(client)
        num_bytes += size
    if clients:
        yield clients


def _shard(clients: list[int], store: ClientStore) -> dict[str, Any]:
    """The content of a shard: numbers and samples consumed, and of each kind of vector whose there are and which."""
    states = [store[client] for client in clients]
    shard: dict[str, Any] = {
        "clients": torch.tensor(clients),
        "consumed": torch.tensor([state.consumed for state in states]),
    }
    for name in VECTORS:
        vectors = [getattr(state, name) for state in states]
        rows = [row for row, vector in enumerate(vectors) if not (vector is None or vector is store.blank.buffers)]
        if rows:
            shard[name] = torch.tensor(rows), torch.stack([vectors[row] for row in rows])
    return shard


def shard_states(shard: dict[str, Any]) -> Iterator[tuple[int, ClientState]]:
    """Of the clients of a shard; in memory of their own, not in that of the whole shard."""
    vectors: list[dict[str, Tensor]] = [{} for _ in shard["clients"]]
    for name in VECTORS:
        rows, values = shard.get(name, ((), ()))
        for row, vector in zip(rows, values, strict=True):
            vectors[row][name] = vector.clone()
    for client, consumed, own in zip(shard["clients"].tolist(), shard["consumed"].tolist(), vectors, strict=True):
        yield client, ClientState(consumed=consumed, **own)


def current_clients(shards: Sequence[CheckpointShard]) -> dict[str, Tensor]:
    """What is up to date of the shards that are so in part only."""
    return {
        shard.name: torch.tensor(sorted(shard.current)) for shard in shards if len(shard.current) < shard.num_clients
    }


def _linked(target: Path, earlier: Sequence[Path], is_equal: Callable[[Path], bool]) -> bool:
    """Whether `target`, whose name carries its content's hash, could be linked to an earlier checkpoint's file."""
    for path in earlier:
        try:
            if is_equal(path / target.name):  # a damaged one is not handed on
                os.link(path / target.name, target)
                return True
        except OSError:
            continue
    return False


def _is_untouched(file: Path, stamp: tuple[int, int, int]) -> bool:
    return stamp_of(file) == stamp


def _has_content(file: Path, content: bytes) -> bool:
    return file.read_bytes() == content


def stamp_of(file: Path) -> tuple[int, int, int]:
    """What changes when somebody writes to a file or replaces it, and not when it gets another name."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
