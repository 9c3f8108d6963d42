"""The store of a run on several hosts: the vectors of each client are with the host that owns it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch

from lcfl.core.clients import VECTORS, ClientState, ClientStore, Result
from lcfl.core.model_sums import ModelSums, Move
from lcfl.distributed.hosts import Hosts, StateElsewhere

__all__ = ["SpreadClientStore"]

STATES_AT_A_TIME = 32  # that are fetched from other hosts


class SpreadClientStore(ClientStore):
    """A `ClientStore` on the server whose clients are owned by hosts, in blocks of consecutive clients.

    A state without vectors stays with the server. Reading another state fetches it from its owner. Sums of models go
    from owner to owner, so models are added in the same order as on one host.

    Args:
        blank: the state of every client that has never taken part.
        hosts: all hosts.
        num_clients: N.
        folder: the folder of the memory-mapped files on each host; None keeps the vectors in its memory.
    """

    def __init__(self, blank: ClientState, hosts: Hosts, num_clients: int, folder: Path | None = None) -> None:
        super().__init__(blank)
        self._hosts, self._num_clients = hosts, num_clients
        self._kept: set[int] = set()  # the clients whose states are with their owners
        hosts.ask("open", dict.fromkeys(range(len(hosts.sizes)), (blank, folder)))

    def __getitem__(self, client: int) -> ClientState:
        (state,) = self.states([client])
        return state

    def __contains__(self, client: int) -> bool:
        return client in self._kept or super().__contains__(client)

    def __iter__(self) -> Iterator[int]:
        """Iterates over the numbers of the clients that have taken part, in ascending order."""
        return iter(sorted(self._kept.union(self._states)))

    def for_task(self, client: int) -> ClientState:
        """Returns the client's state, or names its owner."""
        return (
            StateElsewhere(owner=self._owner(client)) if client in self._kept else self._states.get(client, self.blank)
        )

    def states(self, clients: Iterable[int]) -> Iterator[ClientState]:
        """Yields the states of many clients, of which some are fetched at a time."""
        waiting = iter(clients)
        while part := list(islice(waiting, STATES_AT_A_TIME)):
            answers = self._hosts.ask("call", {owner: (_states, own) for owner, own in self._by_owner(part).items()})
            fetched = {owner: iter(states) for owner, states in answers.items()}
            for client in part:
                state = self.for_task(client)
                yield next(fetched[state.owner]) if isinstance(state, StateElsewhere) else state

    def at_owners(self, function: Callable[[ClientStore, list[int]], Result], clients: Sequence[int]) -> list[Result]:
        """Calls ``function(store, clients)`` on every host with the clients that it owns.

        A result for the clients without vectors, which the server keeps, comes first.
        """
        here = [client for client in clients if client not in self._kept]
        owners = {owner: (function, own) for owner, own in self._by_owner(clients).items()}
        results: list[Result] = [function(self, here)] if here or not owners else []
        return results + list(self._hosts.ask("call", owners).values())

    def update(self, states: Mapping[int, ClientState]) -> None:
        """Stores several states at once; see `ClientStore.update`."""
        for client, state in states.items():
            self._check_memory(client, state.memory_length)
        self._take_out(states)
        by_owner: dict[int, dict[int, ClientState]] = {}
        here: dict[int, ClientState] = {}
        for client, state in states.items():
            if isinstance(state, StateElsewhere) or self._has_vectors(state):
                by_owner.setdefault(self._owner(client), {})[client] = state
            else:
                here[client] = state
        self._drop(here)
        for client, state in here.items():
            self._set(client, state)
        self._hosts.ask("update", {owner: (own,) for owner, own in by_owner.items()})
        for own in by_owner.values():
            for client in own:
                self._kept.add(client)
                self._states.pop(client, None)
                self.checkpoint_shards.changed(client)

    def forget(self, client: int) -> None:
        """Resets a client to the blank state."""
        super().forget(client)
        self._drop([client])

    def move_models(self, sums: ModelSums, moves: Sequence[Move]) -> None:
        """Carries out moves in the rows of the sums that they change, which go from owner to owner."""
        rows = sorted({row for _, *both in moves for row in both if row >= 0})
        place = {row: number for number, row in enumerate(rows)} | {-1: -1}
        by_owner: dict[int, tuple[list[Move]]] = {}
        for client, before, after in moves:
            by_owner.setdefault(self._owner(client), ([],))[0].append((client, place[before], place[after]))
        part = ModelSums(sums.total[rows], torch.empty(0), sums.error[rows], sums.largest[rows])
        part = self._hosts.relay(part, "move", by_owner)
        sums.total[rows], sums.error[rows], sums.largest[rows] = part.total, part.error, part.largest

    def _owner(self, client: int) -> int:
        return client * len(self._hosts.sizes) // self._num_clients

    def _by_owner(self, clients: Iterable[int]) -> dict[int, list[int]]:
        """Returns the clients that each owner keeps."""
        by_owner: dict[int, list[int]] = {}
        for client in clients:
            if client in self._kept:
                by_owner.setdefault(self._owner(client), []).append(client)
        return by_owner

    def _has_vectors(self, state: ClientState) -> bool:
        vectors = (getattr(state, name) for name in VECTORS)
        return any(vector is not None and vector is not self.blank.buffers for vector in vectors)

    def _drop(self, clients: Iterable[int]) -> None:
        """Has the owners of clients forget what they keep of them."""
        by_owner = self._by_owner(clients)
        self._kept.difference_update(*by_owner.values())
        self._hosts.ask("forget", {owner: (own,) for owner, own in by_owner.items()})


def _states(store: ClientStore, clients: list[int]) -> list[ClientState]:
    return [store[client] for client in clients]
