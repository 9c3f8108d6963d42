"""Writes and reads checkpoints. A checkpoint is a directory that is complete or absent and is checked when it is read.

The directory ``round-000010.ckpt/`` holds the state after 10 rounds. It contains ``state.pt``, the clients' states in
shards whose names include their hash, and ``manifest.json`` with the SHA-256 of every part. Checkpoints share the
shards of clients that have not changed. A checkpoint is written under a temporary name, synced and then renamed, so it
is complete or absent (`lcfl.core.files.atomic_directory`).
"""

import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import lcfl
from lcfl.core.checkpoint_shards import CheckpointShard
from lcfl.core.clients import ClientState, ClientStore
from lcfl.core.files import atomic_directory, write_bytes, write_json
from lcfl.core.model_sums import ModelSums
from lcfl.core.renamed import with_current_names
from lcfl.core.state import FederationState
from lcfl.runs.client_shards import current_clients, shard_states, stamp_of, write_shards
from lcfl.runs.serialization import deserialized, plain_copy, serialized

__all__ = [
    "SCHEMA",
    "CheckpointError",
    "LoadedCheckpoint",
    "checked_parts",
    "path_of",
    "read",
    "read_manifest",
    "write",
]

SCHEMA = 3
READABLE = (2, 3)  # lcfl 0.1.0 wrote schema 2
NAME = re.compile(r"round-(-?\d{5,})\.ckpt")


class CheckpointError(ValueError):
    """Raised if a checkpoint is missing or damaged, or if its schema or its configuration is a different one."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The content of a checkpoint.

    Attributes:
        path: the directory of the checkpoint.
        state: the state of the federation.
        identity: the identity of its configuration, from the manifest.
    """

    path: Path
    state: FederationState
    identity: dict[str, Any]


def write(folder: Path, state: FederationState, identity: dict[str, Any]) -> Path:
    """Writes ``folder/round-<n>.ckpt`` and returns its path.

    The checkpoint is complete or absent, even if the process is killed while it writes.

    Args:
        folder: the folder of the run's checkpoints.
        state: the state after n complete rounds; n is negative as long as warm-up rounds are due.
        identity: plain values by name, which must be equal when the checkpoint is resumed.

    Raises:
        ValueError: if the state of the federation or of a callback holds a value that could not be read back. Nothing
            is written then.
    """
    server = _server(state)
    folder.mkdir(parents=True, exist_ok=True)
    final = path_of(folder, state.round)
    earlier = sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name)), reverse=True)
    with atomic_directory(final) as temporary:
        shards = write_shards(temporary, state.clients, earlier)
        content = serialized(server | {"current": current_clients(shards)})
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
    """Returns the path of the checkpoint after `number` rounds."""
    return folder / f"round-{number:06d}.ckpt"


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint after it has checked it against the digest inside.

    Raises:
        CheckpointError: if there is no checkpoint, if the manifest is damaged, or if this version cannot read its
            schema.
    """
    is_checkpoint = NAME.fullmatch(path.name) or (path / "manifest.json").is_file()
    if not path.is_dir() or not is_checkpoint:
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
    if manifest["schema"] not in READABLE:
        raise CheckpointError(
            f"{path} has schema {manifest['schema']} (lcfl {manifest['lcfl']}); this is lcfl {lcfl.__version__}, "
            f"which reads schemas {' and '.join(map(str, READABLE))}."
        )
    return manifest


def read(path: Path, store_folder: Path | None = None) -> LoadedCheckpoint:
    """Reads and checks a checkpoint. Unpickles nothing but tensors and plain values.

    Args:
        path: the directory of the checkpoint.
        store_folder: the folder of the memory-mapped files that hold the clients' vectors; None keeps the vectors in
            memory.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged, or if its schema is a different one.
    """
    manifest = read_manifest(path)
    parts = checked_parts(path, manifest)
    _, server = next(parts)
    if manifest["schema"] == 2:
        velocity = server.pop("velocity")
        server["aggregation"] = {} if velocity is None else {"velocity": velocity}
    model, buffers = server["initial"] if server.pop("keeps_model") else None, server.pop("buffers")
    clients = ClientStore(ClientState(model=model, buffers=buffers), store_folder)
    sums, current = server.pop("sums"), server.pop("current")
    for name, shard in parts:
        saved = CheckpointShard(name, manifest["sha256"][name], stamp_of(path / name), len(shard["clients"]))
        saved.current = set((current[name] if name in current else shard["clients"]).tolist())
        for client, state in shard_states(shard):
            if client in saved.current:
                clients[client] = state
        clients.checkpoint_shards.saved(saved)
    clients.sums = None if sums is None else ModelSums(**sums)
    return LoadedCheckpoint(path, FederationState(clients=clients, **server), with_current_names(manifest["identity"]))


def checked_parts(path: Path, manifest: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the name and the content of each part, ``state.pt`` first.

    Reads one part at a time, because all parts together may not fit into memory.

    Raises:
        CheckpointError: if a part is missing or damaged, or if it holds more than tensors and plain values.
    """
    for name, digest in manifest["sha256"].items():
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: damaged: {name} cannot be read ({error.strerror}).") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise CheckpointError(
                f"{path}: damaged: {name} does not match its SHA-256. Resume from an earlier checkpoint."
            )
        try:
            part = deserialized(content)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{path}: refused: {name} holds more than tensors and plain values ({reason})."
            ) from None
        yield name, part


def _server(state: FederationState) -> dict[str, Any]:
    """Returns the content of ``state.pt`` that does not depend on the shards, which is all but the clients' states."""
    names = [item.name for item in fields(state) if item.name not in ("clients", "callbacks")]
    store = state.clients
    return {name: plain_copy(getattr(state, name), f"state.{name}") for name in names} | {
        "callbacks": {key: plain_copy(value, f"{key}.state_dict()") for key, value in state.callbacks.items()},
        "keeps_model": store.blank.model is not None,
        "buffers": store.blank.buffers,
        "sums": None if store.sums is None else vars(store.sums),
    }


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
