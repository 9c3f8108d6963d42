"""What a client keeps between two participations, and where that lives."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lcfl.core.files import unnamed_memory
from lcfl.core.model_sums import ModelSums
from lcfl.core.shard_index import ShardIndex

__all__ = ["VECTORS", "ClientState", "ClientStore"]

BLOCK_BYTES = 64 * 2**20  # by which the files of a mapped store grow
BLOCK_VECTORS = 4096  # at most: each is a tensor, and millions of short ones take longer than all the rest


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

    @property
    def sent(self) -> Tensor:
        """w_i as the server last received it; only where clients keep models that they upload whole."""
        model = self.model if self.received is None else self.received
        assert model is not None, "stored models need an exchange whose clients keep them"
        return model


VECTORS = tuple(field.name for field in fields(ClientState) if field.name != "consumed")


class ClientStore:
    """The states of all clients, by number. A client that never took part has the `blank` state.

    The server holds it: a rank is handed the state of a client it trains and hands the new one back,
    so any rank can train any client. Where a client uploads its whole model, the model kept here is
    also what the server last received from it.

    Args:
        blank: the state of whoever never took part; it costs no memory of its own.
        folder: keep the vectors in memory-mapped files there, which the operating system writes out and reads in as
            memory allows; None: in memory. The files have no names: they end with the process, however that ends,
            and a resumed run fills new ones from its checkpoint. A mapped vector is valid until its client's next
            state is stored.

    Attributes:
        sums: of the models that the server received, where an aggregation keeps them; they follow every change.
        shards: which states the newest checkpoint has.
    """

    def __init__(self, blank: ClientState, folder: Path | None = None) -> None:
        self.blank = blank
        self.sums: ModelSums | None = None
        self.shards = ShardIndex()
        self._states: dict[int, ClientState] = {}
        self._mapped = {} if folder is None else {name: _MappedVectors(folder) for name in VECTORS}

    def __getitem__(self, client: int) -> ClientState:
        return self._states.get(client, self.blank)

    def __setitem__(self, client: int, state: ClientState) -> None:
        self._take_out(client)
        # Those of the blank state are the same memory for everybody: a model is measured once for all who share both.
        own = replace(state, buffers=None) if state.buffers is self.blank.buffers else state
        kept: dict[str, Any] = {
            name: vectors.keep(client, getattr(own, name)) for name, vectors in self._mapped.items()
        }
        own = replace(own, **kept)
        self._states[client] = replace(own, buffers=self.blank.buffers) if own.buffers is None else own
        self.shards.changed(client)

    def __contains__(self, client: int) -> bool:
        return client in self._states

    def __iter__(self) -> Iterator[int]:
        """The numbers of the clients that took part, ascending."""
        return iter(sorted(self._states))

    def forget(self, client: int) -> None:
        """Puts a client back to the blank state."""
        self._take_out(client)
        for vectors in self._mapped.values():
            vectors.keep(client, None)
        self._states.pop(client, None)
        self.shards.gone(client)

    def update(self, states: Mapping[int, ClientState]) -> None:
        """Stores several states at once."""
        for client, state in states.items():
            self[client] = state

    def _take_out(self, client: int) -> None:
        if self.sums is not None and client in self._states:
            self.sums.take_out(client, self._states[client].sent)


class _MappedVectors:
    """Vectors of one length in memory-mapped files, by client; a place that is given up is used again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place: dict[int, Tensor] = {}
        self._free: list[Tensor] = []

    def keep(self, client: int, vector: Tensor | None) -> Tensor | None:
        """The vector where it now lives; None gives the client's place up."""
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
        file, memory = unnamed_memory([self._folder], num_bytes, "clients' models (trainer.client_store: mapped)")
        file.close()  # the memory stays
        block = torch.frombuffer(memory, dtype=dtype).view(num_vectors, length)
        self._free += reversed(block.unbind())
