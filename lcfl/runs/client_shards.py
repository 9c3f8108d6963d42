"""Writes and reads the clients' states of a checkpoint, in shards that checkpoints share by hard links.

A checkpoint writes the states that have changed since the previous checkpoint into new shards and links the old shards.
Outdated states in a shard are ignored. If less than half of a shard is still current, its current states are written
again. The bytes written for a checkpoint are therefore on average at most twice the changed bytes, and its size on disk
is at most twice the size of all states. A tensor that seldom changes is a file of its own, which is written when it has
changed.
"""

import errno
import filecmp
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lcfl.core.checkpoint_shards import CheckpointShard
from lcfl.core.clients import VECTORS, ClientState, ClientStore
from lcfl.core.raw_bytes import raw_bytes
from lcfl.runs.serialization import write_serialized

__all__ = ["content_hash", "current_clients", "fixed_hash", "shard_states", "stamp_of", "write_fixed", "write_shards"]

SHARD_BYTES = 8 * 2**20


def write_shards(folder: Path, store: ClientStore, earlier: Sequence[Path]) -> list[CheckpointShard]:
    """Links the shards of `earlier` checkpoints that are still useful and writes all other states into new shards."""
    for shard in store.checkpoint_shards:
        # The shard is not read again to compare it. If its file has been touched, its states are written again.
        untouched = functools.partial(_is_untouched, stamp=shard.stamp)
        if not (shard.is_half_current and _linked(folder / shard.name, earlier, untouched)):
            store.checkpoint_shards.release(shard)
    write = functools.partial(_written_by_owner, folder=folder, earlier=earlier)
    for clients, shards in store.at_owners(write, sorted(store.checkpoint_shards.unsaved)):
        if shards is None or not all((folder / shard.name).is_file() for shard in shards):  # an owner's disk is another
            shards = list(_new_shards(store, clients, folder, earlier))
        for shard in shards:
            shard.stamp = stamp_of(folder / shard.name)
            store.checkpoint_shards.saved(shard)
    return list(store.checkpoint_shards)


def _written_by_owner(
    store: ClientStore, clients: list[int], folder: Path, earlier: Sequence[Path]
) -> tuple[list[int], list[CheckpointShard] | None]:
    """Returns the clients and their new shards, or None if this host cannot write into the folder."""
    try:
        return clients, list(_new_shards(store, clients, folder, earlier)) if folder.is_dir() else None
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        return clients, None


def _new_shards(
    store: ClientStore, clients: Sequence[int], folder: Path, earlier: Sequence[Path]
) -> Iterator[CheckpointShard]:
    """Writes new shards with the states of these clients."""
    for states in _portions(store, clients):
        first = next(iter(states))
        yield _written(folder, f"clients-{first:06d}", _shard(states, store.blank), earlier, list(states))


def write_fixed(
    folder: Path, name: str, tensor: Tensor, store: ClientStore, earlier: Sequence[Path]
) -> CheckpointShard:
    """Links the file of a tensor that seldom or never changes to that of an `earlier` checkpoint, or writes it."""
    sha256, fixed = fixed_hash(name, tensor), store.checkpoint_shards.fixed
    if name in fixed and fixed[name][0] == sha256:
        shard = fixed[name][1]
        if _linked(folder / shard.name, earlier, functools.partial(_is_untouched, stamp=shard.stamp)):
            return shard
    is_view = tensor.untyped_storage().nbytes() != tensor.nbytes  # which would be saved with all of its memory
    shard = _written(folder, name, {name: tensor.clone() if is_view else tensor}, earlier)
    fixed[name] = sha256, shard
    return shard


def fixed_hash(name: str, tensor: Tensor) -> str:
    """Returns the hash of a tensor that seldom changes, and nothing for what is frozen, which never does."""
    return "" if name == "frozen" else content_hash(tensor)


def content_hash(tensor: Tensor) -> str:
    """Returns the SHA-256 of a tensor's entries."""
    return hashlib.sha256(raw_bytes(tensor).numpy().data).hexdigest()


def _written(
    folder: Path, prefix: str, content: dict[str, Any], earlier: Sequence[Path], clients: Sequence[int] = ()
) -> CheckpointShard:
    """Writes a part whose name ends in its hash, or links it to the same part of an `earlier` checkpoint."""
    new = folder / f".{prefix}.tmp"
    digest = write_serialized(new, content)
    file = folder / f"{prefix}-{digest[:16]}.pt"
    equal = functools.partial(filecmp.cmp, new, shallow=False)  # another process may have saved the same states
    if _linked(file, earlier, equal):
        new.unlink()
    else:
        new.replace(file)
    return CheckpointShard(file.name, digest, stamp_of(file), len(clients), set(clients))


def _portions(store: ClientStore, clients: Sequence[int]) -> Iterator[dict[int, ClientState]]:
    """Yields the states of each new shard, in the order of the clients. The bytes of their vectors limit its size."""
    portion: dict[int, ClientState] = {}
    num_bytes = 0
    for client, state in zip(clients, store.states(clients), strict=True):
        size = 16 + sum(vector.nbytes for name in VECTORS if (vector := getattr(state, name)) is not None)
        if portion and num_bytes + size > SHARD_BYTES:
            yield portion
            portion, num_bytes = {}, 0
        portion[client] = state
        num_bytes += size
    if portion:
        yield portion


def _shard(states: Mapping[int, ClientState], blank: ClientState) -> dict[str, Any]:
    """Returns the content of a shard.

    It holds the numbers of the clients and the samples that they have consumed. For each kind of vector, it holds the
    rows of the clients that have one, and the vectors.
    """
    shard: dict[str, Any] = {
        "clients": torch.tensor(list(states)),
        "consumed": torch.tensor([state.consumed for state in states.values()]),
    }
    for name in VECTORS:
        vectors = [getattr(state, name) for state in states.values()]
        rows = [row for row, vector in enumerate(vectors) if not (vector is None or vector is blank.buffers)]
        if rows:
            shard[name] = torch.tensor(rows), torch.stack([vectors[row] for row in rows])
    return shard


def shard_states(shard: dict[str, Any]) -> Iterator[tuple[int, ClientState]]:
    """Yields the number and the state of each client in a shard.

    The vectors are copied, so that they do not keep the memory of the whole shard alive.
    """
    vectors: list[dict[str, Tensor]] = [{} for _ in shard["clients"]]
    for name in VECTORS:
        rows, values = shard.get(name, ((), ()))
        for row, vector in zip(rows, values, strict=True):
            vectors[row][name] = vector.clone()
    for client, consumed, own in zip(shard["clients"].tolist(), shard["consumed"].tolist(), vectors, strict=True):
        yield client, ClientState(consumed=consumed, **own)


def current_clients(shards: Sequence[CheckpointShard]) -> dict[str, Tensor]:
    """Returns the clients whose states are current, by shard name, for shards that are only partly current."""
    return {
        shard.name: torch.tensor(sorted(shard.current)) for shard in shards if len(shard.current) < shard.num_clients
    }


def _linked(target: Path, earlier: Sequence[Path], is_equal: Callable[[Path], bool]) -> bool:
    """Links `target` to the same file of an earlier checkpoint and returns whether that was possible.

    The name of the file contains the hash of its content.
    """
    for path in earlier:
        try:
            if is_equal(path / target.name):  # so that damage does not spread
                os.link(path / target.name, target)
                return True
        except OSError:
            continue
    return False


def _is_untouched(file: Path, stamp: tuple[int, int, int]) -> bool:
    return stamp_of(file) == stamp


def stamp_of(file: Path) -> tuple[int, int, int]:
    """Returns the inode, the size and the time of change of a file.

    They change if the file is written or replaced, but not if it is renamed.
    """
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
