"""What a client keeps between two participations, and where that lives."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

__all__ = ["ClientState", "ClientStore"]


@dataclass(frozen=True)
class ClientState:
    """The private part of one client: never on the wire, kept between its participations.

    Attributes:
        model: its own model w_i as a flat vector ``[P + Q]``; None for a method whose clients keep none.
        consumed: training samples drawn so far in `steps` mode; its next batch begins there.
        buffers: of its networks, ``[Q]``, where they are not exchanged; None: those of the `blank` state.
        received: what the server last received of the model, where a transform of uploads makes that another one.
    """

    model: Tensor | None = None
    consumed: int = 0
    buffers: Tensor | None = None
    received: Tensor | None = None


class ClientStore:
    """The states of all clients, by number. A client that never took part has the `blank` state.

    The server holds it: a rank is handed the state of a client it trains and hands the new one back,
    so any rank can train any client. Where a client uploads its whole model, the model kept here is
    also what the server last received from it.
    """

    def __init__(self, blank: ClientState) -> None:
        self.blank = blank
        self._states: dict[int, ClientState] = {}

    def __getitem__(self, client: int) -> ClientState:
        return self._states.get(client, self.blank)

    def __setitem__(self, client: int, state: ClientState) -> None:
        # Those of the blank state are the same memory for everybody: a model is measured once for all who share both.
        self._states[client] = replace(state, buffers=self.blank.buffers) if state.buffers is None else state

    def __contains__(self, client: int) -> bool:
        return client in self._states

    def __iter__(self) -> Iterator[int]:
        """The numbers of the clients that took part, ascending."""
        return iter(sorted(self._states))

    def forget(self, client: int) -> None:
        """Puts a client back to the blank state."""
        self._states.pop(client, None)

    def update(self, states: Mapping[int, ClientState]) -> None:
        """Stores several states at once."""
        for client, state in states.items():
            self[client] = state
