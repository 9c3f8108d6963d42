"""Checkpoints: directories that are written whole, checked when read, and share unchanged clients.

``round-000010.ckpt/`` holds the state after 10 rounds: ``state.pt``, the clients' states in shards
whose names carry their hash, and ``manifest.json`` with the SHA-256 of every part. Two checkpoints
with an equal shard share it by a hard link, so deleting one leaves the other whole.
"""

import hashlib
import io
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lcfl
from lcfl.clients import ClientState, ClientStore
from lcfl.files import temporary_directory, write_bytes, write_json
from lcfl.run import versions
from lcfl.state import FederationState

__all__ = [
    "SCHEMA",
    "CheckpointError",
    "Saved",
    "drop_after",
    "find",
    "newest",
    "read",
    "read_manifest",
    "remove",
    "write",
]

SCHEMA = 1
SHARD_BYTES = 8 * 2**20
NAME = re.compile(r"round-(-?\d{5,})\.ckpt")


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
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"round-{state.round:06d}.ckpt"
    earlier = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path != final]
    with temporary_directory(final) as temporary:
        digests = {}
        for name, content in _parts(state):
            digest = hashlib.sha256(content).hexdigest()
            name = name.format(digest=digest[:16])
            digests[name] = digest
            if not _linked(temporary / name, content, earlier):
                write_bytes(temporary / name, content)
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


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked against its own digest.

    Raises:
        CheckpointError: if there is none, it is damaged, or its schema is not this version's.
    """
    if not path.is_dir():
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


def read(path: Path) -> Saved:
    """Reads and checks a checkpoint. Only tensors and plain values are ever unpickled.

    Raises:
        CheckpointError: if it is missing, damaged or of another schema.
    """
    manifest = read_manifest(path)
    parts: dict[str, Any] = {}
    for name, digest in manifest["sha256"].items():
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: damaged: {name} cannot be read ({error.strerror}).") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise CheckpointError(f"{path}: damaged: {name} does not match its SHA-256. Resume from an earlier one.")
        try:
            parts[name] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{path}: refused: {name} holds more than tensors and plain values ({reason})."
            ) from None
    server = parts.pop("state.pt")
    blank = ClientState(
        model=server["initial"] if server.pop("keeps_model") else None, buffers=server.pop("buffers", None)
    )
    clients = ClientStore(blank)
    for shard in parts.values():
        none = [False] * len(shard["clients"]), None
        columns = (
            _unstacked(shard["has_model"], shard["models"]),
            shard["consumed"],
            _unstacked(*shard.get("buffers", none)),
            _unstacked(*shard.get("received", none)),
        )
        for client, *theirs in zip(shard["clients"], *columns, strict=True):
            clients[client] = ClientState(*theirs)
    return Saved(path, FederationState(clients=clients, **server), manifest["identity"])


def find(ckpt_path: str, root: Path, name: str) -> Path:
    """The checkpoint that ``--ckpt_path`` means.

    Args:
        ckpt_path: a checkpoint's directory; a run's, for its newest; ``last``, the newest whole one among
            the versions of that name; or ``best``, the one that the newest run's monitor chose.
        root: ``trainer.default_root_dir``.
        name: ``trainer.name``.

    Raises:
        CheckpointError: if there is none; says where it looked.
    """
    if ckpt_path not in ("last", "best"):
        path = Path(ckpt_path)
        return newest([path]) if (path / "checkpoints").is_dir() else path
    runs = versions(root, name)
    if not runs:
        raise CheckpointError(f"--ckpt_path {ckpt_path}: there is no run of that name: no {root / name}/version_<n>.")
    return newest(runs) if ckpt_path == "last" else _best(runs)


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
    raise CheckpointError("there is no best checkpoint: no run of that name has a Checkpoint callback with a monitor.")


def _is_whole(path: Path) -> bool:
    try:
        read(path)
    except CheckpointError as error:
        warnings.warn(f"passed over: {error}", stacklevel=2)
        return False
    return True


def _parts(state: FederationState) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file; ``{digest}`` in a name is for its hash."""
    server = {item.name: _compact(getattr(state, item.name)) for item in fields(state) if item.name != "clients"}
    blank = state.clients.blank
    server |= {"keeps_model": blank.model is not None} | ({} if blank.buffers is None else {"buffers": blank.buffers})
    yield "state.pt", _serialized(server)
    width = max(1, SHARD_BYTES // (4 * len(state.initial)))
    shards: dict[int, list[int]] = {}
    for client in state.clients:
        shards.setdefault(client // width, []).append(client)
    for number, clients in shards.items():
        states = [state.clients[client] for client in clients]
        has_model, models = _stacked([client.model for client in states])
        shard = {
            "clients": clients,
            "consumed": [client.consumed for client in states],
            "has_model": has_model,
            "models": models,
        }
        own = {
            "buffers": [None if client.buffers is blank.buffers else client.buffers for client in states],
            "received": [client.received for client in states],
        }
        shard |= {name: _stacked(vectors) for name, vectors in own.items() if any(v is not None for v in vectors)}
        yield f"clients-{number:06d}-{{digest}}.pt", _serialized(shard)


def _stacked(tensors: list[Tensor | None]) -> tuple[list[bool], Tensor | None]:
    """Which of them are there, and those as one tensor."""
    there = [tensor for tensor in tensors if tensor is not None]
    return [tensor is not None for tensor in tensors], torch.stack(there) if there else None


def _unstacked(is_there: list[bool], stacked: Tensor | None) -> list[Tensor | None]:
    rows = iter(() if stacked is None else stacked)
    return [next(rows).clone() if there else None for there in is_there]


def _compact(value: Any) -> Any:
    """A view would be saved with the whole memory it looks into."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _compact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_compact(item) for item in value]
    return value


def _serialized(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _linked(target: Path, content: bytes, earlier: list[Path]) -> bool:
    """Whether `target`, whose name carries its content's hash, could be linked to an earlier checkpoint's file."""
    if not target.name.startswith("clients-"):
        return False
    for path in earlier:
        try:
            if (path / target.name).read_bytes() == content:  # a damaged one is not handed on
                os.link(path / target.name, target)
                return True
        except OSError:
            continue
    return False


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
