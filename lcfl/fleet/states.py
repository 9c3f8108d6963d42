"""The private states of a client, on the disk of its node, which they never leave."""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lcfl.core.clients import VECTORS, ClientState
from lcfl.core.files import read_regular, replacing, sync_directory, write_json
from lcfl.core.schema import Array, Number, check_form
from lcfl.fleet.parcel import MessageError
from lcfl.runs.serialization import deserialized, write_serialized

__all__ = ["NodeStates", "Owner", "newest_model", "spec_of", "state_name"]

LOGGER = logging.getLogger(__name__)
NAME = re.compile(r"round-(\d{6,})-[0-9a-f]{16}")
OWNER = "client.json"
FORM = {name: (Array((None,)), None) for name in VECTORS} | {"consumed": Number(int, 0)}


def state_name(number: int, nonce: str) -> str:
    """Returns the name of the state after round `number`, as the request with this nonce made it."""
    return f"round-{number:06d}-{nonce}"


class Owner(NamedTuple):
    """Whose models are kept in a folder.

    Attributes:
        identity: that of the app, see `lcfl.fleet.node.identity_of`.
        place: which client of the node's data it is.
    """

    identity: str
    place: int


class NodeStates:
    """The states of a client after each of its latest rounds, one file each.

    The server names the state that the client goes on from. It is not always the newest one: an answer may have been
    lost, or the server may have been resumed from a checkpoint. A name is never used twice, so an old request that
    arrives late changes nothing.

    Args:
        folder: where the files are.
        blank: the state of a client that has never taken part.
        begins_anew: whether a state that is lost is replaced by the blank one.
    """

    def __init__(self, folder: Path, blank: ClientState, begins_anew: bool = False) -> None:
        self.folder, self.blank, self.begins_anew = folder, blank, begins_anew

    def __getitem__(self, name: str | None) -> ClientState:
        """Returns the state with this name; the blank state for None.

        Raises:
            MessageError: if there is none.
        """
        if name is None:
            return self.blank
        try:
            content = deserialized(read_regular(self._path(name)))
            check_form("", content, FORM, {})
        except FileNotFoundError:
            if self.begins_anew:
                LOGGER.warning("%s has no state %s: the client begins anew", self.folder, name)
                return self.blank
            kept = ", ".join(self._kept()) or "nothing"
            raise MessageError(
                f"this node has no state {name} of this run; its folder has {kept}. Restore the folder or, if it is "
                "lost, start the node with begin-anew=true in its node-config."
            ) from None
        except MessageError:
            raise
        except Exception as error:
            raise MessageError(f"the state {name} on this node is damaged ({error}).") from None
        return ClientState(**content)

    def keep(self, name: str, state: ClientState) -> None:
        """Stores a state. The file is complete or absent, also after a power failure."""
        self._make_folder()
        with replacing(self._path(name)) as temporary:
            write_serialized(temporary, {each: getattr(state, each) for each in (*VECTORS, "consumed")})
        sync_directory(self.folder)

    def keep_model(self, kind: str, weights: Mapping[str, Any], owner: Owner, spec: Mapping[str, Any]) -> None:
        """Stores the tensors of a client's model for its owner, a state dict in ``<kind>.pt``.

        A full disk is only reported, because the federation does not need the file.

        Args:
            kind: the kind of model.
            weights: the state dict.
            owner: whose model it is.
            spec: what the samples look like, see `lcfl.fleet.data.described_spec`.
        """
        try:
            self._make_folder()
            write_json(self.folder / OWNER, {**owner._asdict(), "spec": spec})
            with replacing(self.folder / f"{kind}.pt") as temporary:
                write_serialized(temporary, {name: each for name, each in weights.items() if isinstance(each, Tensor)})
        except OSError as error:
            LOGGER.warning("%s: the %s model of this evaluation is not kept (%s)", self.folder, kind, error)

    def forget_before(self, number: int) -> None:
        """Removes the states after rounds before `number`."""
        for name, after in self._kept().items():
            if after < number:
                self._path(name).unlink(missing_ok=True)

    def _kept(self) -> dict[str, int]:
        """Returns the names of the states in the folder, each with its round."""
        names = sorted(path.stem for path in self.folder.glob("round-*.pt"))
        return {name: int(match[1]) for name in names if (match := NAME.fullmatch(name))}

    def _make_folder(self) -> None:
        for folder in (*reversed(self.folder.parents[:2]), self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _path(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise MessageError(f"{name!r:.40} is no name of a state.")
        return self.folder / f"{name}.pt"


def newest_model(folder: Path, kind: str, owner: Owner) -> Path:
    """Returns the file with the newest model of a kind that a client keeps, of all runs in a node's folder.

    Raises:
        FileNotFoundError: if there is none.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; give the folder with the node's states.")
    found = [path for place in folder.rglob("client-*") if _is_of(place, owner) for path in place.glob("*.pt")]
    models = {path: path.stat().st_mtime_ns for path in found if not NAME.fullmatch(path.stem)}
    if not any(path.stem == kind for path in models):
        kinds = ", ".join(sorted({path.stem for path in models})) or "none"
        raise FileNotFoundError(
            f"{folder} has no {kind} model of this app and client; models of theirs in it: {kinds}. A node keeps the "
            "models that it has tested. Use the versions of lcfl, torch and lightning that it had in the run."
        )
    return max((path for path in models if path.stem == kind), key=models.__getitem__)


def _is_of(folder: Path, owner: Owner) -> bool:
    try:
        found = json.loads(read_regular(folder / OWNER))
        return all(found[name] == value for name, value in owner._asdict().items())
    except (OSError, ValueError, TypeError, LookupError):  # a client that has tested no model yet, or a damaged file
        return False


def spec_of(model: Path) -> dict[str, Any]:
    """Returns what the samples looked like with which a model was tested that `newest_model` has found."""
    spec: dict[str, Any] = json.loads(read_regular(model.with_name(OWNER)))["spec"]
    return spec
