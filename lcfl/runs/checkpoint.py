"""Checkpoints: directories that are written whole, checked when read, and share unchanged clients.

``round-000010.ckpt/`` holds the state after 10 rounds: ``state.pt``, the clients' states in shards
whose names carry their hash, and ``manifest.json`` with the SHA-256 of every part. A checkpoint is
written under another name, synced and renamed, so it is whole or absent (`lcfl.core.files.temporary_directory`).
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
from lcfl.core.clients import ClientState, ClientStore
from lcfl.core.files import temporary_directory, write_bytes, write_json
from lcfl.core.model_sums import ModelSums
from lcfl.core.renamed import with_current_names
from lcfl.core.shard_index import CheckpointShard
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
READABLE = (2, 3)  # 2: lcfl 0.1.0
NAME = re.compile(r"round-(-?\d{5,})\.ckpt")


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, of another schema or of another configuration."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read: the state, and the manifest's identity of its configuration."""

    path: Path
    state: FederationState
    identity: dict[str, Any]


def write(folder: Path, state: FederationState, identity: dict[str, Any]) -> Path:
    """Writes ``folder/round-<n>.ckpt`` and returns its path; killed at any moment, it is whole or absent.

    Args:
        folder: of the run's checkpoints.
        state: after n complete rounds; negative while warm-up rounds are due.
        identity: plain values by name: what must be equal when the checkpoint is resumed.

    Raises:
        ValueError: if the state, or that of a callback, holds what could not be read back; nothing is written then.
    """
    server = _server(state)
    folder.mkdir(parents=True, exist_ok=True)
    final = path_of(folder, state.round)
    earlier = sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name)), reverse=True)
    with temporary_directory(final) as temporary:
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
    if manifest["schema"] not in READABLE:
        raise CheckpointError(
            f"{path}: has schema {manifest['schema']} (lcfl {manifest['lcfl']}); this is lcfl {lcfl.__version__}, "
            f"which reads schemas {' and '.join(map(str, READABLE))}."
        )
    return manifest


def read(path: Path, store_folder: Path | None = None) -> LoadedCheckpoint:
    """Reads and checks a checkpoint. Only tensors and plain values are ever unpickled.

    Args:
        path: of the checkpoint.
        store_folder: where the clients' vectors are to live in memory-mapped files; None: in memory.

    Raises:
        CheckpointError: if it is missing, damaged or of another schema.
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
        clients.shards.saved(saved)
    clients.sums = None if sums is None else ModelSums(**sums)
    return LoadedCheckpoint(path, FederationState(clients=clients, **server), with_current_names(manifest["identity"]))


def checked_parts(path: Path, manifest: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and content of each part, ``state.pt`` first; one at a time, since all may not fit into memory."""
    for name, digest in manifest["sha256"].items():
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: damaged: {name} cannot be read ({error.strerror}).") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise CheckpointError(f"{path}: damaged: {name} does not match its SHA-256. Resume from an earlier one.")
        try:
            part = deserialized(content)
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
    return {name: plain_copy(getattr(state, name), f"state.{name}") for name in names} | {
        "callbacks": {key: plain_copy(kept, f"{key}.state_dict()") for key, kept in state.callbacks.items()},
        "keeps_model": store.blank.model is not None,
        "buffers": store.blank.buffers,
        "sums": None if store.sums is None else vars(store.sums),
    }


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
