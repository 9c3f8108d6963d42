"""Writes and reads checkpoints. A checkpoint is a directory that is complete or absent and is checked when it is read.

The directory ``round-000010.ckpt/`` holds the state after 10 rounds. It contains ``state.pt``, the clients' states in
shards whose names include their hash, what is frozen in all models in ``frozen-<hash>.pt``, the projection in
``projection-<hash>.pt``, and ``manifest.json`` with the SHA-256 of every part. Checkpoints share the files of these two
and of clients as long as these do not change. A checkpoint is written under a temporary name, synced and then renamed,
so it is complete or absent (`lcfl.core.files.atomic_directory`).
"""

import hashlib
import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

import lcfl
from lcfl.core.callback import Callback, with_state_keys
from lcfl.core.checkpoint_shards import CheckpointShard
from lcfl.core.clients import ClientState, ClientStore
from lcfl.core.earlier_versions import current_state, with_current_names
from lcfl.core.files import atomic_directory, open_regular, read_regular, write_json
from lcfl.core.model_sums import ModelSums
from lcfl.core.schema import Forms, check_form
from lcfl.core.state import FederationState
from lcfl.runs.checkpoint_schema import (
    FIXED,
    Expected,
    check_codes,
    check_fixed,
    check_manifest,
    check_shard,
    check_state,
)
from lcfl.runs.client_shards import current_clients, fixed_hash, shard_states, stamp_of, write_fixed, write_shards
from lcfl.runs.serialization import deserialized, plain_copy, write_serialized

__all__ = [
    "SCHEMA",
    "CheckpointError",
    "DamagedError",
    "LoadedCheckpoint",
    "check_files",
    "identity_of",
    "path_of",
    "read",
    "read_frozen",
    "read_manifest",
    "saved_in",
    "write",
]

SCHEMA = 3
READABLE = (2, 3)  # lcfl 0.1.0 wrote schema 2
NAME = re.compile(r"round-(-?\d{5,})\.ckpt")


class CheckpointError(ValueError):
    """Raised if a checkpoint is missing or damaged, or if its schema or its configuration is a different one."""


class DamagedError(CheckpointError):
    """Raised if a file of a checkpoint is missing, or is not the file that was written."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The content of a checkpoint.

    Attributes:
        path: the directory of the checkpoint.
        state: the state of the federation.
        identity: the identity of its configuration, from the manifest.
        sizes: the sizes by letter, see `lcfl.runs.checkpoint_schema`.
    """

    path: Path
    state: FederationState
    identity: dict[str, Any]
    sizes: dict[str, int]

    def restore(self, callbacks: Iterable[Callback], aggregation: Forms) -> None:
        """Restores what clusterings and callbacks remember. One that the checkpoint does not know remembers nothing.

        Args:
            callbacks: the clusterings and callbacks.
            aggregation: the forms of what the aggregation remembers.

        Raises:
            CheckpointError: if something that is remembered has another form.
        """
        for name in aggregation.keys() & self.state.aggregation.keys():
            try:
                check_form(f"aggregation.{name}", self.state.aggregation[name], aggregation[name], dict(self.sizes))
            except ValueError as error:
                raise CheckpointError(f"{self.path}: damaged: {error}.") from None
        by_key = with_state_keys(callbacks)
        saved, now = (Counter(key.partition("#")[0] for key in keys) for keys in (self.state.callbacks, dict(by_key)))
        remembering = {key.partition("#")[0] for key, kept in self.state.callbacks.items() if kept}
        others = {name for name in remembering & now.keys() if saved[name] != now[name]}
        if others:  # which of them is which?
            counts = ", ".join(f"{saved[name]} {name} and not {now[name]}" for name in sorted(others))
            warnings.warn(
                f"{self.path} has {counts}: these callbacks start anew, without what they remember.", stacklevel=3
            )
        for key, callback in by_key:
            callback.forget()
            if key not in self.state.callbacks or key.partition("#")[0] in others:
                continue
            kept = self.state.callbacks[key]
            try:
                if type(callback).state_dict is Callback.state_dict:
                    check_form(key, kept, dict(callback.remembers), dict(self.sizes))
                callback.load_state_dict(kept)
            except Exception as error:  # of any kind, because a user's callback may raise anything
                raise CheckpointError(f"{self.path}: {key} cannot be restored ({_reason(error)}).") from None


def saved_in(folder: Path) -> list[tuple[int, Path]]:
    """Returns the rounds and the paths of the checkpoints in a folder, in ascending order."""
    return sorted((int(match[1]), path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name)))


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
    server, fixed = _server(state), _fixed(state)
    try:
        check_state(server | {"current": {}}, None)
    except ValueError as error:
        raise ValueError(
            f"the state after {state.round} rounds could not be read from a checkpoint: {error}."
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    final = path_of(folder, state.round)
    earlier = [path for _, path in reversed(saved_in(folder))]
    with atomic_directory(final, replaces=True) as temporary:
        shards = write_shards(temporary, state.clients, earlier)
        digests = {"state.pt": write_serialized(temporary / "state.pt", server | {"current": current_clients(shards)})}
        parts = [write_fixed(temporary, name, tensor, state.clients, earlier) for name, tensor in fixed.items()]
        digests |= {part.name: part.sha256 for part in (*parts, *shards)}
        sizes = {name: (temporary / name).stat().st_size for name in digests}
        manifest = {
            "schema": SCHEMA,
            "lcfl": lcfl.__version__,
            "round": state.round,
            "created": time.time(),
            "identity": identity,
            "sha256": digests,
            "bytes": sizes,
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
        of_file = " Weights in a file, such as one of lightning.Trainer, are for model.init_from."
        raise CheckpointError(
            f"{path.absolute()}: there is no checkpoint. Give a run directory, a directory round-<n>.ckpt, last or "
            f"best.{of_file * path.is_file()}"
        )
    try:
        manifest: dict[str, Any] = json.loads(read_regular(path / "manifest.json"))
        digest = manifest.pop("digest")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: manifest.json cannot be read ({_reason(error)}).") from None
    if digest != _digest(manifest):
        raise CheckpointError(f"{path}: damaged: manifest.json does not match its digest.")
    if manifest.get("schema") not in READABLE:
        raise CheckpointError(
            f"{path} has schema {manifest.get('schema')} (lcfl {manifest.get('lcfl')}); this is lcfl "
            f"{lcfl.__version__}, which reads schemas {' and '.join(map(str, READABLE))}."
        )
    try:
        check_manifest(manifest)
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged: manifest.json: {error}.") from None
    return manifest


def identity_of(path: Path) -> dict[str, Any]:
    """Returns the identity of a checkpoint's configuration, with the names that this version uses.

    Raises:
        CheckpointError: as `read_manifest`.
    """
    identity: dict[str, Any] = with_current_names(read_manifest(path)["identity"])
    return identity


def read(
    path: Path, new_store: Callable[[ClientState], ClientStore] = ClientStore, expected: Expected | None = None
) -> LoadedCheckpoint:
    """Reads and checks a checkpoint. Unpickles nothing but tensors and plain values.

    Args:
        path: the directory of the checkpoint.
        new_store: makes the store of the clients' states, given the blank state.
        expected: the sizes of the run that reads it, if they are known.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged, if its schema is a different one, or if its content
            does not fit together or is not what is expected.
    """
    manifest = read_manifest(path)
    parts = _checked_parts(path, manifest)
    _, server = next(parts)
    try:
        server = current_state(server, manifest["schema"])
        sizes = check_state(server, expected)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged: state.pt: {_reason(error)}.") from None
    keeps_model, buffers = server.pop("keeps_model"), server.pop("buffers")
    clients = new_store(ClientState(model=server["initial"] if keeps_model else None, buffers=buffers))
    sums, current = server.pop("sums"), server.pop("current")
    for name, shard in parts:
        kind = name.partition("-")[0]
        try:
            if kind in FIXED:
                check_fixed(shard, kind, sizes)
                if server.get(kind) is not None:
                    raise ValueError(f"{kind}: state.pt has one, too")
                server[kind] = shard[kind]
                saved = CheckpointShard(name, manifest["sha256"][name], stamp_of(path / name), 0)
                clients.checkpoint_shards.fixed[kind] = fixed_hash(kind, shard[kind]), saved
                continue
            check_shard(shard, sizes, keeps_model)
            held = set(shard["clients"].tolist())
            newest = set(current[name].tolist()) if name in current else held
            if not newest <= held or any(client in clients for client in newest):
                raise ValueError("clients: every client must be in one shard")
        except ValueError as error:
            raise CheckpointError(f"{path}: damaged: {name}: {error}.") from None
        saved = CheckpointShard(name, manifest["sha256"][name], stamp_of(path / name), len(held), newest)
        clients.update({client: own for client, own in shard_states(shard) if client in newest})
        clients.checkpoint_shards.saved(saved)
    clients.sums = None if sums is None else ModelSums(**sums)
    try:
        check_codes(server)
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged: {error}.") from None
    has_frozen = "frozen" in server
    if expected is not None and has_frozen is not ("F" in expected.sizes):
        raise CheckpointError(
            f"{path}: damaged: it has {'a' if has_frozen else 'no'} part frozen-<hash>.pt, but this network has "
            f"{'no' if has_frozen else 'a'} frozen part."
        )
    state = FederationState(clients=clients, **server)
    return LoadedCheckpoint(path, state, with_current_names(manifest["identity"]), sizes)


def read_frozen(path: Path) -> Tensor | None:
    """Returns what is frozen in all models of a checkpoint ``[F]``; None if nothing is.

    Raises:
        CheckpointError: if the checkpoint is missing, or that part of it is damaged.
    """
    manifest = read_manifest(path)
    digests = {name: digest for name, digest in manifest["sha256"].items() if name.startswith("frozen-")}
    for name, part in _checked_parts(path, manifest | {"sha256": digests}):
        try:
            check_fixed(part, "frozen", {})
        except ValueError as error:
            raise CheckpointError(f"{path}: damaged: {name}: {error}.") from None
        frozen: Tensor = part["frozen"]
        return frozen
    return None


def check_files(path: Path) -> None:
    """Checks that a checkpoint has all its files, with the sizes in its manifest. Does not read what is in them.

    Raises:
        CheckpointError: as `read_manifest`.
        DamagedError: if a file is missing or has another size.
    """
    manifest = read_manifest(path)
    for name in manifest["sha256"]:
        _part_file(path, name, manifest).close()


def _part_file(path: Path, name: str, manifest: dict[str, Any]) -> BinaryIO:
    try:
        return open_regular(path / name, manifest.get("bytes", {}).get(name))
    except OSError as error:
        raise DamagedError(f"{path}: damaged: {name} cannot be read ({error.strerror}).") from None


def _checked_parts(path: Path, manifest: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the name and the content of each part, ``state.pt`` first.

    Reads one part at a time, because all parts together may not fit into memory.

    Raises:
        DamagedError: if a part is missing or damaged, or if it holds more than tensors and plain values.
    """
    for name, digest in manifest["sha256"].items():
        try:
            with _part_file(path, name, manifest) as file:
                content = file.read()
        except OSError as error:
            raise DamagedError(f"{path}: damaged: {name} cannot be read ({error.strerror}).") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise DamagedError(
                f"{path}: damaged: {name} does not match its SHA-256. Resume from an earlier checkpoint."
            )
        try:
            part = deserialized(content)
        except Exception as error:
            raise DamagedError(
                f"{path}: refused: {name} holds more than tensors and plain values ({_reason(error)})."
            ) from None
        yield name, part


def _server(state: FederationState) -> dict[str, Any]:
    """Returns the content of ``state.pt`` that does not depend on other parts."""
    names = [item.name for item in fields(state) if item.name not in ("clients", "callbacks", *FIXED)]
    store = state.clients
    return {name: plain_copy(getattr(state, name), f"state.{name}") for name in names} | {
        "callbacks": {key: plain_copy(value, f"{key}.state_dict()") for key, value in state.callbacks.items()},
        "keeps_model": store.blank.model is not None,
        "buffers": store.blank.buffers,
        "sums": None if store.sums is None else vars(store.sums),
        "projection": None,
    }


def _fixed(state: FederationState) -> dict[str, Tensor]:
    """Returns the tensors of the state that are parts of their own, by name."""
    fixed = {}
    for name, form in FIXED.items():
        if (tensor := getattr(state, name)) is not None:
            fixed[name] = tensor.detach() if isinstance(tensor, Tensor) else tensor
            check_form(f"state.{name}", fixed[name], form, {})
    return fixed


def _reason(error: Exception) -> str:
    """Returns the first line of an error's message."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.partition("\n")[0] or type(error).__name__


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
