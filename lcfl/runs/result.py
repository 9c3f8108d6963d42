"""The result of a federation: metrics, a run directory, and models for prediction."""

import functools
import warnings
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn

from lcfl.core.client_names import client_number
from lcfl.core.clients import ClientStore
from lcfl.core.files import read_json
from lcfl.core.state import FederationState
from lcfl.methods.exchange import ModelKind
from lcfl.methods.local.least_loss import LeastLoss
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule
from lcfl.runs import checkpoint, checkpoint_lookup
from lcfl.runs.directory import MEMBERS
from lcfl.runs.finished import metrics_of

__all__ = ["Run"]


class Run:
    """A finished or stopped run. Its state is read from a checkpoint when it is first needed.

    Args:
        path: the run directory.
        module: the module that was trained, which builds the network.
        method: the method, which defines the personal model of a client.
        signal: the number of the signal that stopped the run; 0 if none did.
        client_store: ``mapped`` reads the clients' models into memory-mapped files instead of memory.
        ckpt_path: the checkpoint to read: ``last``, the newest; ``best``, the one that the run's monitor chose; the
            name of a checkpoint; its path; or None if the run has left none.
    """

    def __init__(
        self,
        path: Path,
        module: FederatedModule,
        method: Method,
        signal: int = 0,
        client_store: str = "memory",
        ckpt_path: str | Path | None = "last",
    ) -> None:
        self.path = path
        self.signal = signal
        self._module = module
        self._method = method
        self._client_store = client_store
        self._ckpt_path = ckpt_path

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """The final metrics by name. They are empty if the run was stopped before its end."""
        summary = self.path / "summary.json"
        return metrics_of(read_json(summary)) if summary.is_file() else {}

    @functools.cached_property
    def state(self) -> FederationState:
        """The state in the checkpoint of the run.

        Raises:
            CheckpointError: if there is no checkpoint, or no longer, or if it is damaged.
        """
        if self._ckpt_path is None:
            raise checkpoint.CheckpointError(
                f"trainer.enable_checkpointing: got False, so {self.path} has no checkpoint to read a model from; fit "
                "it again with True."
            )
        folder = self.path if self._client_store == "mapped" else None
        new_store = functools.partial(ClientStore, folder=folder)
        read = functools.partial(checkpoint.read, new_store=new_store)
        if self._ckpt_path == "last":
            return checkpoint_lookup.read_newest([self.path], read).state
        return read(checkpoint_lookup.of_run(self.path, self._ckpt_path)).state

    @functools.cached_property
    def client_names(self) -> list[str] | None:
        """The name of each client; None if clients have only numbers."""
        names: list[str] | None = read_json(self.path / "partition.json").get("names")
        return names

    @property
    def is_of_fleet(self) -> bool:
        """Whether the clients are machines of their own, which keep their data and what is private."""
        return (self.path / MEMBERS).is_file()

    @property
    def chooses_clusters(self) -> bool:
        """Whether clients choose their cluster anew for every evaluation, by their training loss (IFCA)."""
        exchange, local_update = self._method.exchange, self._method.local_update
        return isinstance(exchange.evaluation_update("cluster", local_update), LeastLoss)

    @property
    def keeps_buffers(self) -> bool:
        """Whether each client has buffers of its own (``model.buffer_policy: local``)."""
        return self._module.keeps_buffers

    @property
    def loss(self) -> nn.Module:
        """The loss that was trained with."""
        return self._module.loss

    def client(self, name: str) -> int:
        """Returns the number of the client with this name or, as text, with this number.

        Raises:
            ValueError: if there is no such client.
        """
        return client_number(name, self.client_names, self.state.num_clients)

    def model(self, kind: ModelKind, client: int | str | None = None, cluster: int | None = None) -> nn.Module:
        """Returns a trained model as a plain network, in evaluation mode.

        Args:
            kind: ``global``; ``cluster``, the model of the cluster `cluster` or of the cluster that `client` is in; or
                ``personal``, the model of `client`. If clients choose their cluster anew for every evaluation (IFCA),
                the run knows only what `client` chose when it last trained, and warns of it.
            client: the number or the name of the client. If ``model.buffer_policy`` is ``local``, a model of any kind
                gets the buffers of this client, or those of the initial model if no client is given.
            cluster: the number of the cluster.

        Raises:
            ValueError: if the method has no such model, if a part of it stays on a node of a fleet, if there is no such
                client or cluster, or if the client is in another cluster.
        """
        if isinstance(client, str):
            client = self.client(client)
        exchange, local_update = self._method.exchange, self._method.local_update
        # The server has the model of every cluster, even if clients choose their cluster themselves. Any other model
        # that a client computes would need the client's data.
        allowed = [
            name
            for name in exchange.models
            if name == "cluster" or exchange.evaluation_update(name, local_update) is None
        ]
        if kind not in allowed:
            why = ", which a client makes from its own data, so the run does not hold it" * (kind in exchange.models)
            raise ValueError(f"model: got kind={kind!r}{why}; the method of this run has {', '.join(allowed)}.")
        if self.is_of_fleet:
            self._check_fleet(kind, client, allowed)
        for name, number, end in (
            ("client", client, self.state.num_clients),
            ("cluster", cluster, self.state.num_clusters),
        ):
            is_whole = isinstance(number, Integral) and not isinstance(number, bool)
            if number is not None and not (is_whole and 0 <= number < end):
                raise ValueError(f"model: got {name}={number}; this run has {name}s 0 to {end - 1}.")
        if cluster is not None and kind != "cluster":
            raise ValueError(
                f"model: got cluster={cluster} for a {kind} model; only a cluster model is that of a cluster."
            )
        if client is not None and not self.state.active[client]:
            raise ValueError(
                f"model: client {client} is not in the federation. It is a newcomer, which lcfl onboard adds, or it "
                "has left."
            )
        if kind == "cluster" and client is not None:
            self._check_cluster(client, cluster)
        if kind == "global":
            vector = self.state.global_model
        elif kind == "cluster" and cluster is not None:
            vector = self.state.centres[cluster]
        elif client is None:
            raise ValueError(
                f"model: a {kind} model needs the client whose model it is{', or the cluster' * (kind == 'cluster')}."
            )
        elif kind == "cluster":
            vector = self.state.centre_of(client)
        else:
            vector = self._method.exchange.personal(self.state, client, self._module.layout)
        clients = self.state.clients
        buffers = clients.blank.buffers if client is None else clients[client].buffers
        return self._module.network_of(vector, buffers, self.state.frozen).eval()

    def _check_cluster(self, client: int, cluster: int | None) -> None:
        """Refuses a client beside the number of another cluster; warns of a cluster that may be an old choice."""
        own = int(self.state.assignment[client])
        if self.chooses_clusters:
            if cluster is None:
                like = "" if self.is_of_fleet else ", as in lcfl predict without --data"
                warnings.warn(
                    f"model: the cluster of client {client} is the last that the server knows. In evaluations, clients "
                    f"choose again by their training loss{like}.",
                    stacklevel=3,
                )
        elif cluster not in (None, own):
            raise ValueError(
                f"model: got cluster={cluster}, but client {client} is in cluster {own}; give one of the two."
            )

    def _check_fleet(self, kind: ModelKind, client: int | None, allowed: Sequence[ModelKind]) -> None:
        """Refuses a model of which a part never left the node of its client."""
        if kind == "personal" and self._method.exchange.hides_model:
            others = " and ".join(name for name in allowed if name != "personal")
            has = f"the kinds {others}" if others else "no whole model"
            raise ValueError(
                f"model: got kind='personal', but {self.path} is the run of a fleet, whose clients keep their models "
                f"or parts of them on their nodes. The server has {has}."
            )
        if client is not None and self._module.keeps_buffers:
            raise ValueError(
                f"model: got client={client}, but {self.path} is the run of a fleet with model.buffer_policy=local, "
                "whose clients keep their buffers on their nodes. A global model, or a cluster model by the number of "
                "its cluster, can be had with the buffers of the initial model: leave out the client."
            )

    def summary(self) -> dict[str, Any]:
        """Returns the content of ``summary.json``."""
        return dict(read_json(self.path / "summary.json"))
