"""Checkpoints: directories that are written whole, checked when read, and share unchanged clients.

``round-000010.ckpt/`` holds the state after 10 rounds: ``state.pt``, the clients' states in shards
whose names carry their hash, and ``manifest.json`` with the SHA-256 of every part. Checkpoints share
shards by hard links, so deleting one leaves the others whole. A checkpoint writes the states of the
clients that have changed since the one before it into new shards and links the old ones; what is out
of date in these is passed over, and a shard of which less than half is of use is written anew. So a
checkpoint costs what has changed, twice that at most on average, and takes at most twice the room.
"""

import functools
import hashlib
import io
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lcfl
from lcfl.clients import VECTORS, ClientState, ClientStore
from lcfl.files import temporary_directory, write_bytes, write_json
from lcfl.run import versions
from lcfl.shards import Shard
from lcfl.state import FederationState
from lcfl.sums import ModelSums

__all__ = [
    "SCHEMA",
    "CheckpointError",
    "Saved",
    "drop_after",
    "find",
    "newest",
    "of_run",
    "path_of",
    "read",
    "read_manifest",
    "remove",
    "write",
]

SCHEMA = 2
SHARD_BYTES = 8 * 2**20
NAME = re.compile(r"round-(-?\d{5,})\.ckpt")
PLAIN = (type(None), bool, int, float, str)


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, of another schema or of another configuration."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read: the state, and the manifest's identity of its configuration."""

    path: Path
    state: FederationState
    identity: dict[str, Any]


def write(folder: Path, state: FederationState, identity: dict[str, Any]) -> Path:
    """Writes ``folder/round-<n>.ckpt`` and returns its path; killed at any moment, it is whole or absent.

    Args:
        folder: of the run's checkpoints.
        state: after n complete rounds; negative while opening rounds are due.
        identity: plain values by name: what must be equal when the checkpoint is resumed.

    Raises:
        ValueError: if the state, or that of a callback, holds what could not be read back; nothing is written then.
    """
    server = _server(state)
    folder.mkdir(parents=True, exist_ok=True)
    final = path_of(folder, state.round)
    earlier = sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name)), reverse=True)
    with temporary_directory(final) as temporary:
        shards = _write_shards(temporary, state.clients, earlier)
        content = _serialized(server | {"current": _current(shards)})
        write_bytes(temporary / "state.pt", content)
        digests = {"state.pt": hashlib.sha256(content).hexdigest()} | {shard.name: shard.sha256 for shard in shards}
        manifest = {
            "schema": SCHEMA,
            "lcfl": lcfl.__version__,
            "round": state.round,
            "created": time.time(),
            "identity": identity,
            "sha256": digests,
        }
        write_json(temporary / "manifest.json", manifest | {"digest": _digest(manifest)}, indent=2)
    return final


def path_of(folder: Path, number: int) -> Path:
    """Where the checkpoint after `number` rounds lies."""
    return folder / f"round-{number:06d}.ckpt"


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked against its own digest.

    Raises:
        CheckpointError: if there is none, it is damaged, or its schema is not this version's.
    """
    is_one = NAME.fullmatch(path.name) or (path / "manifest.json").is_file()
    if not path.is_dir() or not is_one:
        raise CheckpointError(
            f"{path.absolute()}: there is no checkpoint. Give a directory round-<n>.ckpt, last or best."
        )
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
        digest = manifest.pop("digest")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged: manifest.json cannot be read ({error}).") from None
    if digest != _digest(manifest):
        raise CheckpointError(f"{path}: damaged: manifest.json does not match its digest.")
    if manifest["schema"] != SCHEMA:
        raise CheckpointError(
            f"{path}: has schema {manifest['schema']} (lcfl {manifest['lcfl']}); this is lcfl {lcfl.__version__}, "
            f"which reads schema {SCHEMA}."
        )
    return manifest


def read(path: Path, store_folder: Path | None = None) -> Saved:
    """Reads and checks a checkpoint. Only tensors and plain values are ever unpickled.

    Args:
        path: of the checkpoint.
        store_folder: where the clients' vectors are to live in memory-mapped files; None: in memory.

    Raises:
        CheckpointError: if it is missing, damaged or of another schema.
    """
    manifest = read_manifest(path)
    parts = _checked_parts(path, manifest)
    _, server = next(parts)
    model, buffers = server["initial"] if server.pop("keeps_model") else None, server.pop("buffers")
    clients = ClientStore(ClientState(model=model, buffers=buffers), store_folder)
    sums, current = server.pop("sums"), server.pop("current")
    for name, shard in parts:
        saved = Shard(name, manifest["sha256"][name], _stamp(path / name), len(shard["clients"]))
        saved.current = set((current[name] if name in current else shard["clients"]).tolist())
        for client, state in _states(shard):
            if client in saved.current:
                clients[client] = state
        clients.shards.saved(saved)
    clients.sums = None if sums is None else ModelSums(**sums)
    return Saved(path, FederationState(clients=clients, **server), manifest["identity"])


def find(ckpt_path: str, root: Path, name: str) -> Path:
    """The checkpoint that ``--ckpt_path`` means.

    Args:
        ckpt_path: a checkpoint's directory; a run's, for its newest; ``last``, the newest whole one among
            the versions of that name; or ``best``, the one that the newest run's monitor chose.
        root: ``trainer.default_root_dir``.
        name: ``trainer.name``.

    Raises:
        CheckpointError: if there is none; says where it looked. Of a path only the manifest is read.
    """
    if ckpt_path not in ("last", "best"):
        path = Path(ckpt_path)
        found = newest([path]) if (path / "checkpoints").is_dir() else path
    else:
        runs = versions(root, name)
        if not runs:
            raise CheckpointError(
                f"--ckpt_path {ckpt_path}: there is no run of that name: no {root / name}/version_<n>."
            )
        found = newest(runs) if ckpt_path == "last" else _best(runs)
    read_manifest(found)
    return found


def of_run(run: Path, ckpt_path: str | Path) -> Path:
    """The checkpoint of a run directory that is meant: ``last``, the newest; ``best``; its name; or its path.

    Raises:
        CheckpointError: if there is none, or it is another run's.
    """
    if ckpt_path == "last":
        return newest([run])
    if ckpt_path == "best":
        return _best([run])
    folder, path = run / "checkpoints", Path(ckpt_path)
    if path.name == str(path):
        path = folder / path
    if path.resolve().parent != folder.resolve():
        raise CheckpointError(f"{path} is no checkpoint of {run}: give the name of one in {folder}, last or best.")
    return path


def newest(runs: Sequence[Path]) -> Path:
    """The checkpoint of these run directories that was written last and is whole.

    Raises:
        CheckpointError: if there is none.
    """
    candidates = []
    for path in (path for run in runs for path in (run / "checkpoints").glob("round-*.ckpt")):
        try:
            candidates.append((read_manifest(path)["created"], path))
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
    for _, path in sorted(candidates, reverse=True):
        if _is_whole(path):
            return path
    looked = ", ".join(str(run / "checkpoints") for run in runs)
    raise CheckpointError(f"there is no whole checkpoint; looked in {looked}.")


def drop_after(folder: Path, number: int) -> None:
    """Removes the checkpoints of rounds after `number`: a run that goes on from there has abandoned them."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        match = NAME.fullmatch(path.name)
        if match and int(match[1]) > number:
            remove(path)
    best = folder / "best.json"
    if best.is_file() and not (folder / str(json.loads(best.read_text())["checkpoint"])).is_dir():
        best.unlink()


def remove(path: Path) -> None:
    """Removes a checkpoint; killed at any moment, there is none left under its name or a whole one."""
    doomed = path.rename(path.with_name(f".{path.name}.old"))
    shutil.rmtree(doomed)


def _best(runs: Sequence[Path]) -> Path:
    for run in runs:
        choice = run / "checkpoints" / "best.json"
        if choice.is_file():
            return choice.parent / str(json.loads(choice.read_text())["checkpoint"])
    looked = ", ".join(str(run) for run in runs)
    raise CheckpointError(
        f"there is no best checkpoint: no Checkpoint callback with a monitor has chosen one in {looked}."
    )


def _is_whole(path: Path) -> bool:
    try:
        for _ in _checked_parts(path, read_manifest(path)):
            pass
    except CheckpointError as error:
        warnings.warn(f"passed over: {error}", stacklevel=2)
        return False
    return True


def _checked_parts(path: Path, manifest: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and content of each part, ``state.pt`` first; one at a time, since all may not fit into memory."""
    for name, digest in manifest["sha256"].items():
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: damaged: {name} cannot be read ({error.strerror}).") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise CheckpointError(f"{path}: damaged: {name} does not match its SHA-256. Resume from an earlier one.")
        try:
            part = _deserialized(content)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{path}: refused: {name} holds more than tensors and plain values ({reason})."
            ) from None
        yield name, part


def _server(state: FederationState) -> dict[str, Any]:
    """The content of ``state.pt`` that does not depend on the shards: everything but the clients' states."""
    names = [item.name for item in fields(state) if item.name not in ("clients", "callbacks")]
    store = state.clients
    return {name: _plain(getattr(state, name), f"state.{name}") for name in names} | {
        "callbacks": {key: _plain(kept, f"{key}.state_dict()") for key, kept in state.callbacks.items()},
        "keeps_model": store.blank.model is not None,
        "buffers": store.blank.buffers,
        "sums": None if store.sums is None else vars(store.sums),
    }


def _current(shards: Sequence[Shard]) -> dict[str, Tensor]:
    """What is up to date of the shards that are so in part only."""
    return {
        shard.name: torch.tensor(sorted(shard.current)) for shard in shards if len(shard.current) < shard.num_clients
    }


def _write_shards(folder: Path, store: ClientStore, earlier: Sequence[Path]) -> list[Shard]:
    """Links the shards that are still of use from `earlier` checkpoints, and writes new ones of all other states."""
    for shard in store.shards:
        # It is not read again; one that somebody has touched since is written anew.
        untouched = functools.partial(_has_stamp, stamp=shard.stamp)
        if not (shard.is_half_current and _linked(folder / shard.name, earlier, untouched)):
            store.shards.release(shard)
    for clients in _portions(store):
        content = _serialized(_shard(clients, store))
        digest = hashlib.sha256(content).hexdigest()
        file = folder / f"clients-{clients[0]:06d}-{digest[:16]}.pt"
        equal = functools.partial(_has_content, content=content)  # as of a state that another process has saved here
        if not _linked(file, earlier, equal):
            write_bytes(file, content)
        store.shards.saved(Shard(file.name, digest, _stamp(file), len(clients), set(clients)))
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


def _states(shard: dict[str, Any]) -> Iterator[tuple[int, ClientState]]:
    """Of the clients of a shard; in memory of their own, not in that of the whole shard."""
    vectors: list[dict[str, Tensor]] = [{} for _ in shard["clients"]]
    for name in VECTORS:
        rows, values = shard.get(name, ((), ()))
        for row, vector in zip(rows, values, strict=True):
            vectors[row][name] = vector.clone()
    for client, consumed, own in zip(shard["clients"].tolist(), shard["consumed"].tolist(), vectors, strict=True):
        yield client, ClientState(consumed=consumed, **own)


def _plain(value: Any, owner: str) -> Any:
    """A copy that can be read back: numpy's scalars are Python's, tensors have memory of their own.

    A view would be saved with the whole memory it looks into.

    Raises:
        ValueError: naming `owner`, for anything but tensors and plain values.
    """
    if type(value) in (Tensor, torch.nn.Parameter):
        return value.clone()
    if isinstance(value, dict):
        return {_plain(key, owner): _plain(item, f"{owner}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, owner) for item in value]
    if type(value) in (tuple, set):
        return type(value)(_plain(item, owner) for item in value)
    plain = value.item() if isinstance(value, np.generic) else value
    if type(plain) not in PLAIN and not _is_readable(plain):
        raise ValueError(
            f"{owner} holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be read back from a "
            "checkpoint. Keep tensors, numbers, text and None there, or dicts, lists, tuples and sets of them."
        )
    return plain


def _is_readable(value: Any) -> bool:
    try:
        _deserialized(_serialized(value))
    except Exception:  # whatever its pickling does
        return False
    return True


def _serialized(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _deserialized(content: bytes) -> Any:
    """Only tensors and plain values; no code is run."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


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


def _has_stamp(file: Path, stamp: tuple[int, int, int]) -> bool:
    return _stamp(file) == stamp


def _has_content(file: Path, content: bytes) -> bool:
    return file.read_bytes() == content


def _stamp(file: Path) -> tuple[int, int, int]:
    """What changes when somebody writes to a file or replaces it, and not when it gets another name."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
