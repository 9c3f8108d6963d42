"""What a client keeps between the rounds in which it takes part, and the store that holds it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lcfl.core.checkpoint_shards import CheckpointShardIndex
from lcfl.core.files import unlinked_memory
from lcfl.core.model_sums import ModelSums, Move

__all__ = ["VECTORS", "ClientState", "ClientStore"]

Result = TypeVar("Result")

BLOCK_BYTES = 64 * 2**20  # the files of a mapped store grow by this much
BLOCK_VECTORS = 4096  # most in a block: each becomes a tensor, and making millions of short ones takes too long


@dataclass(frozen=True)
class ClientState:
    """The private part of one client. It is never sent, and the client keeps it between its participations.

    Attributes:
        model: the personal model w_i as a flat vector ``[P + Q]``; None for a method whose clients keep no model.
        consumed: the number of training samples drawn so far in `steps` mode; the next batch begins there.
        buffers: the buffers of its networks ``[Q]``, if they are not exchanged; None means those of the `blank` state.
        received: the model as the server last received it, if an upload transform or a fault makes it differ.
        memory: what the local update remembers for this client, a vector in float32 of the same length for all clients.
        previous: the parameters ``[P]`` that a client with a `StaleUpdate` trained the last time.
    """

    model: Tensor | None = None
    consumed: int = 0
    buffers: Tensor | None = None
    received: Tensor | None = None
    memory: Tensor | None = None
    previous: Tensor | None = None

    @property
    def stored_model(self) -> Tensor:
        """w_i as the server last received it. It exists only if clients keep models that they upload whole."""
        model = self.model if self.received is None else self.received
        assert model is not None, "stored models need an exchange whose clients keep them"
        return model

    @property
    def memory_length(self) -> int | None:
        """How many numbers `memory` has; None without one."""
        return None if self.memory is None else len(self.memory)


VECTORS = tuple(field.name for field in fields(ClientState) if field.name != "consumed")


class ClientStore:
    """The states of all clients, by number. A client that has never taken part has the `blank` state.

    The host of the server, or each host of several, holds a store. It hands the state of a client to the rank that
    trains the client, and the rank hands the new state back, so any rank of the host can train the client. If a client
    uploads its whole model, the model kept here is also what the server last received from it.

    Args:
        blank: the state of every client that has never taken part; they share it and take up no further memory.
        folder: the folder of memory-mapped files that hold the vectors; the operating system writes them out and reads
            them in as memory allows. None keeps the vectors in memory. The files have no names. They vanish with the
            process, however it ends, and a resumed run fills new files from its checkpoint. A mapped vector is valid
            until the next state of its client is stored.

    Attributes:
        sums: the sums of the models that the server has received, if an aggregation keeps them; they follow every
            change.
        checkpoint_shards: the index of the states that the newest checkpoint holds.
    """

    def __init__(self, blank: ClientState, folder: Path | None = None) -> None:
        self.blank = blank
        self.sums: ModelSums | None = None
        self.checkpoint_shards = CheckpointShardIndex()
        self._states: dict[int, ClientState] = {}
        self._memory_length: int | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._mapped = {} if folder is None else {name: _MappedVectors(folder) for name in VECTORS}

    def __getitem__(self, client: int) -> ClientState:
        return self._states.get(client, self.blank)

    def __setitem__(self, client: int, state: ClientState) -> None:
        self.update({client: state})

    def _set(self, client: int, state: ClientState) -> None:
        # The buffers of the blank state are shared and not copied, because a model is evaluated only once for all
        # clients that share both the model and the buffers.
        own = replace(state, buffers=None) if state.buffers is self.blank.buffers else state
        mapped: dict[str, Any] = {
            name: vectors.keep(client, getattr(own, name)) for name, vectors in self._mapped.items()
        }
        own = replace(own, **mapped)
        self._states[client] = replace(own, buffers=self.blank.buffers) if own.buffers is None else own
        self.checkpoint_shards.changed(client)

    def __contains__(self, client: int) -> bool:
        return client in self._states

    def __iter__(self) -> Iterator[int]:
        """Iterates over the numbers of the clients that have taken part, in ascending order."""
        return iter(sorted(self._states))

    def forget(self, client: int) -> None:
        """Resets a client to the blank state."""
        self._take_out([client])
        for vectors in self._mapped.values():
            vectors.keep(client, None)
        self._states.pop(client, None)
        self.checkpoint_shards.gone(client)

    def update(self, states: Mapping[int, ClientState]) -> None:
        """Stores several states at once.

        Raises:
            ValueError: for a memory that is not as long as the others.
        """
        self._take_out(states)
        for client, state in states.items():
            self._check_memory(client, state.memory_length)
            self._set(client, state)

    def _check_memory(self, client: int, length: int | None) -> None:
        """Refuses a memory that is not as long as those of the other clients."""
        if length is None:
            return
        if self._memory_length not in (None, length):
            raise ValueError(
                f"client {client}: LocalOutput.memory has {length} numbers, and an earlier one has "
                f"{self._memory_length}. Its length must be the same for all clients and rounds; fill it up."
            )
        self._memory_length = length

    def for_task(self, client: int) -> ClientState:
        """Returns what a task of the client carries: its state, or the word that its state is kept elsewhere."""
        return self[client]

    def states(self, clients: Iterable[int]) -> Iterator[ClientState]:
        """Yields the states of many clients. This is faster than one by one if they are kept elsewhere."""
        return map(self.__getitem__, clients)

    def at_owners(self, function: Callable[["ClientStore", list[int]], Result], clients: Sequence[int]) -> list[Result]:
        """Calls ``function(store, clients)`` wherever states of these clients are kept, with the clients kept there.

        A calculation that needs little of many models goes to the models, and not the models to it.

        Args:
            function: can be pickled, and changes no state.
            clients: in ascending order.

        Returns:
            The results, in the order of their first clients; here, where all clients are, one result.
        """
        return [function(self, list(clients))]

    def move_models(self, sums: ModelSums, moves: Sequence[Move]) -> None:
        """Carries out moves of the models that the server last received, in the order of the clients' numbers."""
        sums.move(moves, lambda client: self[client].stored_model)

    def _take_out(self, clients: Iterable[int]) -> None:
        if self.sums is not None:
            self.sums.take_out(clients, self.move_models)


class _MappedVectors:
    """Vectors of one length in memory-mapped files, by client. A place that becomes free is used again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place: dict[int, Tensor] = {}
        self._free: list[Tensor] = []

    def keep(self, client: int, vector: Tensor | None) -> Tensor | None:
        """Copies a vector to the client's place and returns the copy; None frees the place."""
        if vector is None:
            if client in self._place:
                self._free.append(self._place.pop(client))
            return None
        if client not in self._place:
            if not self._free:
                self._grow(len(vector), vector.dtype)
            self._place[client] = self._free.pop()
        return self._place[client].copy_(vector)

    def _grow(self, length: int, dtype: torch.dtype) -> None:
        num_vectors = max(1, min(BLOCK_VECTORS, BLOCK_BYTES // (length * dtype.itemsize)))
        num_bytes = num_vectors * length * dtype.itemsize
        file, memory = unlinked_memory([self._folder], num_bytes, "clients' models (trainer.client_store: mapped)")
        file.close()  # the mapped memory stays valid
        block = torch.frombuffer(memory, dtype=dtype).view(num_vectors, length)
        self._free += reversed(block.unbind())
