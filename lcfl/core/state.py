"""The state of a federation. It holds everything that outlives a round.

Legend: N clients, K clusters, P + Q length of a model's flat vector, D length of a code, F length of what is frozen.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lcfl.core.clients import ClientState, ClientStore

__all__ = ["FederationState"]


@dataclass
class FederationState:
    """What the server knows and what the clients keep private, after `round` complete rounds.

    Attributes:
        round: the next round; negative until all warm-up rounds are complete.
        initial: the common initial model ``[P + Q]``.
        global_model: the mean model ``[P + Q]``; its first P_phi entries are the global embedding Phi.
        centres: Omega, the cluster models ``[K, P + Q]``.
        assignment: R, the cluster of each client ``[N]``, int64; -1 for a client that has no cluster and is sent the
            global model.
        participated: whether each client has completed a training round and has not left ``[N]``, bool.
        clients: the clients' private states.
        projection: M as ``[P, D]`` if a clustering uses one.
        codes: the low-rank model of each client ``[N, D]``; rows of clients without one are zero.
        aggregation: what the aggregation remembers between rounds, by name; tensors and plain values. A matrix with K
            rows has one row for each cluster.
        total_bytes: bytes sent and received so far, including warm-up rounds.
        should_stop: set by a callback that wants no further round.
        callbacks: what each callback keeps, by its key; plain values and tensors.
        active: whether each client belongs to the federation now ``[N]``, bool. Newcomers, which stay outside until the
            federation has ended, and clients that have left do not belong to it. By default all clients do.
        frozen: the parameters and buffers that are frozen, and so equal in all models ``[F]``; None if nothing is.
    """

    round: int
    initial: Tensor
    global_model: Tensor
    centres: Tensor
    assignment: Tensor
    participated: Tensor
    clients: ClientStore
    projection: Tensor | None = None
    codes: Tensor | None = None
    aggregation: dict[str, Any] = field(default_factory=dict)
    total_bytes: int = 0
    should_stop: bool = False
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    active: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    frozen: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.active) == 0:
            self.active = torch.ones(len(self.assignment), dtype=torch.bool)

    @classmethod
    def create(
        cls,
        initial: Tensor,
        num_clients: int,
        keeps_model: bool,
        num_warmup_rounds: int = 0,
        newcomers: Iterable[int] = (),
        buffers: Tensor | None = None,
        new_store: Callable[[ClientState], ClientStore] = ClientStore,
        frozen: Tensor | None = None,
    ) -> "FederationState":
        """Returns the state before the first round, with all clients in one cluster and all models at the initial one.

        Args:
            initial: the initial model ``[P + Q]``, or ``[P]`` if buffers are not exchanged.
            num_clients: N.
            keeps_model: whether clients keep a model, as the exchange says.
            num_warmup_rounds: the number of rounds before the first training round.
            newcomers: the clients that take no part.
            buffers: those of the initial model, if they are not exchanged.
            new_store: keeps the clients' states; called with the blank state.
            frozen: the parameters that are not trained.
        """
        state = cls(
            round=-num_warmup_rounds,
            initial=initial,
            global_model=initial.clone(),  # a method may change its models in place
            centres=initial.unsqueeze(0).clone(),
            assignment=torch.zeros(num_clients, dtype=torch.int64),
            participated=torch.zeros(num_clients, dtype=torch.bool),
            clients=new_store(ClientState(model=initial if keeps_model else None, buffers=buffers)),
            frozen=frozen,
        )
        outside = list(newcomers)
        state.active[outside] = False
        state.assignment[outside] = -1
        return state

    @property
    def num_clients(self) -> int:
        """N, the size of the population."""
        return len(self.assignment)

    @property
    def num_clusters(self) -> int:
        """K, the current number of cluster centres."""
        return len(self.centres)

    def grown(self, num_clients: int) -> "FederationState":
        """Returns a state with places for more clients, who have no cluster and do not belong to the federation."""
        more = num_clients - self.num_clients
        outside = torch.zeros(more, dtype=torch.bool)
        return replace(
            self,
            assignment=torch.cat([self.assignment, torch.full((more,), -1)]),
            participated=torch.cat([self.participated, outside]),
            active=torch.cat([self.active, outside]),
            codes=None
            if self.codes is None
            else torch.cat([self.codes, self.codes.new_zeros(more, self.codes.shape[1])]),
        )

    def check_models(self, by: str) -> None:
        """Refuses a global model or centres that are not models.

        Args:
            by: who may have set them, for the message.

        Raises:
            ValueError: with what it is and what it must be.
        """
        size = len(self.initial)
        for name, dimensions in (("global_model", 1), ("centres", 2)):
            value = getattr(self, name)
            is_tensor = isinstance(value, Tensor)
            fits = is_tensor and value.dtype == torch.float32 and value.dim() == dimensions and value.shape[-1] == size
            if not fits or not len(value):
                got = f"{value.dtype} of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
                shape = f"[{size}]" if dimensions == 1 else f"[K, {size}] with K of at least 1"
                raise ValueError(f"{by}: state.{name} has {got}; it must be a tensor of float32 and shape {shape}.")

    def check_assignment(self, by: str) -> None:
        """Refuses an assignment that does not give each client a cluster or -1.

        Args:
            by: who may have set it, for the message.

        Raises:
            ValueError: with what it is and what it must be.
        """
        assigned, size = self.assignment, len(self.active)
        if not isinstance(assigned, Tensor):
            got = f"a {type(assigned).__name__}"
        elif assigned.shape != (size,) or assigned.dtype != torch.int64:
            got = f"{assigned.dtype} of shape {list(assigned.shape)}"
        elif size and not -1 <= int(assigned.min()) <= int(assigned.max()) < self.num_clusters:
            got = f"numbers from {int(assigned.min())} to {int(assigned.max())}"
        else:
            return
        raise ValueError(
            f"{by}: state.assignment has {got}; it must be a tensor of int64 with a number for each of the {size} "
            f"clients, from -1 (no cluster) to {self.num_clusters - 1}, because state.centres has {self.num_clusters} "
            "models."
        )

    def take_clusters(self, origins: Sequence[int]) -> None:
        """Keeps the centres of these clusters, in this order, and what the aggregation remembers of each.

        A cluster that is left out is dropped. One that is named twice is split, and both halves begin with what it had.
        """
        for name, value in self.aggregation.items():
            if isinstance(value, Tensor) and value.dim() > 1 and len(value) == self.num_clusters:
                self.aggregation[name] = value[origins]
        self.centres = self.centres[origins]

    def centre_of(self, client: int) -> Tensor:
        """Returns Omega_{R_i}, the model ``[P + Q]`` of the client's cluster, or the global model if it has none."""
        cluster = int(self.assignment[client])
        return self.centres[cluster] if cluster >= 0 else self.global_model

    def stored_model(self, client: int) -> Tensor:
        """Returns w_i as the server last received it. It exists only if clients keep models that they upload whole."""
        return self.clients[client].stored_model

    def stored_models(self, clients: Iterable[int]) -> Iterator[Tensor]:
        """Yields the `stored_model` of each of these clients."""
        return (state.stored_model for state in self.clients.states(clients))

    def leave(self, clients: Iterable[int]) -> None:
        """Removes clients for good and forgets their models, so that no mean or clustering counts them any more."""
        clients = list(clients)
        if not clients:
            return
        self.assignment = self.assignment.clone()
        for client in clients:
            self.active[client] = self.participated[client] = False
            self.assignment[client] = -1
            self.clients.forget(client)

    def members(self, cluster: int) -> list[int]:
        """Returns the clients of a cluster that have taken part, so that their models count, in ascending order."""
        return torch.nonzero((self.assignment == cluster) & self.participated).flatten().tolist()
