"""What objects hold after a run, brought from the process of rank 0 to the process that started it."""

import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from lcfl.core.clients import ClientStore
from lcfl.core.state import FederationState

__all__ = ["HeldAttributes"]


class HeldAttributes:
    """The attributes of objects that exist in both processes.

    They travel in a file, because they may be large, and a pipe is read only after all ranks have ended. An attribute
    that cannot be pickled stays as it is, with a warning unless its value before the run could not be pickled either,
    e.g. a lock.

    Args:
        owners: the objects.
        known: further objects that both processes have. They do not travel: what refers to one of them, or to an owner,
            then refers to the object of the process that started rank 0.
    """

    def __init__(self, owners: Sequence[object], known: Sequence[object] = ()) -> None:
        self._owners, self._known = owners, [*owners, *known]

    def write(self, path: Path) -> None:
        """Writes the attributes to a file, or warns if that is not possible."""
        held = []
        for owner in self._owners:
            attributes, stays = dict(vars(owner)), {}
            for name, value in vars(owner).items():
                if (reason := self._reason_to_stay(value)) is not None:
                    stays[name] = reason
                    del attributes[name]
            held.append((attributes, stays))
        try:
            with path.open("wb") as file:
                _Pickler(file, self._known).dump(held)
        except Exception as error:  # of any kind, because the run itself is complete: a full disk, no memory
            _warn(f"callbacks are as before the run, because what they hold could not be written: {error}")
            path.unlink(missing_ok=True)

    def restore(self, path: Path) -> None:
        """Gives the owners what `write` wrote; does nothing if it wrote no file."""
        if not path.exists():
            return
        try:
            with path.open("rb") as file:
                held: list[tuple[dict[str, Any], Mapping[str, str]]] = _Unpickler(file, self._known).load()
        except Exception as error:  # of any kind, because a class may be unpickled by any code
            _warn(f"callbacks are as before the run, because what they hold could not be read: {error}")
            return
        lost = []
        for owner, (attributes, stays) in zip(self._owners, held, strict=True):
            own = vars(owner)
            lost += [
                f"{type(owner).__name__}.{name} ({reason})"
                for name, reason in stays.items()
                if name not in own or self._reason_to_stay(own[name]) is None
            ]
            for name in own.keys() - attributes.keys() - stays.keys():
                del own[name]
            own.update(attributes)
        if lost:
            _warn(
                "what the run has put into these attributes was lost with the process of rank 0, because it cannot be "
                f"pickled: {', '.join(lost)}. Set trainer.devices to 1 to have it after the run."
            )

    def _reason_to_stay(self, value: object) -> str | None:
        """Returns why a value cannot be pickled; None if it can."""
        try:
            with open(os.devnull, "wb") as nowhere:
                _Pickler(nowhere, self._known).dump(value)
        except Exception as error:  # of any kind, because a class may be pickled by any code
            return str(error)
        return None


def _warn(text: str) -> None:
    warnings.warn(f"trainer.callbacks: {text}", stacklevel=3)


class _Pickler(pickle.Pickler):
    """Writes known objects by their numbers, and tensors as compact copies in memory.

    A view would otherwise take all that it is a view of, and a GPU is for ranks alone. The state of the federation does
    not travel, because it has the models of all clients.
    """

    def __init__(self, file: IO[bytes], known: Sequence[object]) -> None:
        super().__init__(file)
        self._numbers = {id(each): number for number, each in enumerate(known)}

    def persistent_id(self, value: Any) -> int | None:
        return self._numbers.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FederationState | ClientStore):
            raise pickle.PicklingError("the state after the run is in what fit returns")
        if type(value) is Tensor or (isinstance(value, Tensor) and value.device.type != "cpu"):
            return value.detach().cpu().clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Reads known objects by their numbers."""

    def __init__(self, file: IO[bytes], known: Sequence[object]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, number: int) -> object:
        return self._known[number]
