"""The LightningModule: a split network and the regularised loss of LCFed Eq. 2 (FedAC Eq. 3).

Legend: P parameters, P_phi of them in the embedding, Q buffer entries, B batch.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lcfl.core import rng
from lcfl.core.validation import check_choice
from lcfl.models.layout import Layout
from lcfl.models.pretrained import load_weights
from lcfl.models.split_network import NetworkFactory

__all__ = ["BufferPolicy", "FederatedModule", "loss_of_step"]

Batch = tuple[Tensor, Tensor]
BufferPolicy = Literal["average", "keep_server", "local"]


class FederatedModule(pl.LightningModule):
    """A network split into embedding and decision, trained on ``L_sup + L_cluster + L_global``.

    LCFed Eq. 2, per client with parameters w = (phi, h):

        L(w) = L_sup(w) + mu/2 |w - Omega|^2 + lambda/2 |phi - Phi|^2

    Omega, the centre of the client's cluster, and Phi, the global embedding, are given by
    `pull_towards` before a local run and stay frozen during it. Without them (FedAvg, Local, or under
    ``lightning.Trainer``) the loss is L_sup alone.

    A federation calls `training_step` and `configure_optimizers` and nothing else while a client
    trains, so overriding either takes effect, and a subclass with other hooks of Lightning is warned of; what a
    step logs with `self.log`, one number by name, becomes a metric of the round.

    Args:
        network: makes a new network when called: a class, a function, a ``functools.partial`` of one.
        optimizer: makes the optimizer of one client's local run from its parameters; if not given, SGD
            with a learning rate of 0.01.
        cut: the layer at which the decision begins, with all that the network registers after it
            (``decision`` for a `SplitNetwork`, ``fc`` for torchvision's ResNets). None: no decision.
        cluster_weight: mu, the pull of all parameters towards the cluster's centre.
        global_weight: lambda, the pull of the embedding towards the global embedding.
        loss: L_sup of scores ``[B, classes]`` and labels ``[B]``, a mean over the batch.
        metrics: what evaluation reports beside the loss, by name; accuracy under the name ``acc`` if not given.
        init_from: a file with a network's state dict (``torch.save(network.state_dict(), path)``) that every
            initial model is read from instead of being drawn.
        buffer_policy: what becomes of all that the network registers as a persistent buffer, such as
            BatchNorm's running statistics. ``average``: buffers are a part of every model and merged with it,
            integers by their maximum. ``keep_server``: every model has those of the initial model; what a local
            run makes of them is dropped. ``local``: they are a client's private part; it trains every model
            with its own, and evaluates every model with its own, those of the initial model until it first took
            part. Only with ``average`` are they sent, counted, and seen by a method.

    Raises:
        ValueError: for a negative weight, a network that is an object instead of a factory, or one
            without the layer `cut`, a factory whose networks share parameters, a file `init_from` that
            does not fit the network, or another `buffer_policy`.

    Attributes:
        layout: of a model's flat vector: ``[P + Q]`` with ``average``, else ``[P]``.
        buffer_layout: of the flat vector ``[Q]`` of buffers that are not exchanged; None where there are none.
    """

    def __init__(
        self,
        network: NetworkFactory,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        cut: str | None = "decision",
        cluster_weight: float = 0.0,
        global_weight: float = 0.0,
        loss: nn.Module | None = None,
        metrics: dict[str, Metric] | None = None,
        init_from: str | Path | None = None,
        buffer_policy: BufferPolicy = "average",
    ) -> None:
        super().__init__()
        if isinstance(network, nn.Module):
            raise ValueError(
                f"model.network: got a finished {type(network).__name__}; needed is what makes a new one, because "
                "every initial model is drawn anew: pass the class, or a function such as lambda: MyNet(...)."
            )
        for name, weight in (("cluster_weight", cluster_weight), ("global_weight", global_weight)):
            if not weight >= 0:
                raise ValueError(f"model.{name}: got {weight}; a regulariser's weight is a number >= 0.")
        check_choice("model.buffer_policy: got ", buffer_policy, get_args(BufferPolicy))
        self.make_network = network
        self.network = network()
        ours = {parameter.data_ptr() for parameter in self.network.parameters()}
        if any(parameter.data_ptr() in ours for parameter in network().parameters()):
            raise ValueError(
                "model.network: two calls gave networks with the same parameters; every call must make new ones. In "
                "YAML name lcfl.models.split instead of SplitNetwork: it takes factories of embedding and decision."
            )
        self._whole = Layout.from_network(self.network, cut)
        self.buffer_policy = buffer_policy
        self.layout: Layout = self._whole
        self.buffer_layout: Layout | None = None
        if self._whole.buffers and buffer_policy != "average":
            self.layout, self.buffer_layout = self._whole.split_buffers()
        self._unkept = [
            (place, name, None if layer._buffers[name] is None else layer.get_buffer(name).clone())
            for place, layer in self.network.named_modules()
            for name in sorted(layer._non_persistent_buffers_set)
        ]
        if init_from is not None:
            load_weights(self.network, init_from)
        self._initial = None if init_from is None else self._whole.pack(self.network)
        self.optimizer = optimizer
        self.cluster_weight = cluster_weight
        self.global_weight = global_weight
        self.loss = loss if loss is not None else nn.CrossEntropyLoss()
        if metrics is None:
            metrics = {"acc": MulticlassAccuracy(average="micro", validate_args=False)}
        self.metrics = MetricCollection(dict(metrics))
        self.trainer_metrics = nn.ModuleDict(
            {f"{stage}_": self.metrics.clone(f"{stage}/") for stage in ("val", "test")}
        )
        for metric in self.metrics.values():
            metric.distributed_available_fn = _never  # ranks measure different clients: there is nothing to add up
        self._centre: Tensor | None = None
        self._embedding: Tensor | None = None
        self._logged: dict[str, list[Tensor]] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores ``[B, classes]``."""
        scores: Tensor = self.network(inputs)
        return scores

    def pull_towards(self, centre: Tensor | None = None, embedding: Tensor | None = None) -> None:
        """Sets what the next local run is pulled towards: Omega ``[P]`` and Phi ``[P_phi]``; None for no pull."""
        self._centre, self._embedding = centre, embedding

    @contextmanager
    def collecting(self) -> Iterator[dict[str, list[Tensor]]]:
        """What `log` is given inside, by name in the order of the steps, instead of going to a Trainer."""
        self._logged = {}
        try:
            yield self._logged
        finally:
            self._logged = None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """As LightningModule's; in a federation the mean over a client's steps, then over clients, is logged.

        Raises:
            ValueError: in a federation, for something else than one number.
        """
        if self._logged is None:
            super().log(name, value, *args, **kwargs)
            return
        try:
            number = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError):
            number = None
        if number is None or number.numel() != 1:
            got = type(value).__name__ if number is None else f"a tensor of shape {list(number.shape)}"
            raise ValueError(
                f"self.log({name!r}): got {got}; a metric is one number: log a mean, or what a torchmetrics object "
                "gives when it is called with scores and labels."
            )
        self._logged.setdefault(name, []).append(number)

    def regularizer(self) -> Tensor | float:
        """L_cluster + L_global = mu/2 |w - Omega|^2 + lambda/2 |phi - Phi|^2, in float32."""
        centre = self._centre if self.cluster_weight > 0 else None
        target = self._embedding if self.global_weight > 0 else None
        if centre is None and target is None:
            return 0.0
        parameters = torch.cat([parameter.reshape(-1) for parameter in self.network.parameters()])
        penalty = parameters.new_zeros(())
        if centre is not None:
            penalty = penalty + self.cluster_weight / 2 * (parameters - centre).square().sum()
        if target is not None:
            embedding = self.layout.embedding_of(parameters)
            penalty = penalty + self.global_weight / 2 * (embedding - target).square().sum()
        return penalty

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        """The loss of one batch (LCFed Eq. 2); its gradient is line 4 of LocalUpdate in Algorithm 1."""
        inputs, targets = batch
        loss: Tensor = self.loss(self(inputs), targets) + self.regularizer()
        return loss

    def configure_optimizers(self) -> Optimizer:
        """A new optimizer for one local run: its momentum starts at zero at every participation."""
        return self.optimizer(self.network.parameters())

    def initial_model(self, seed: int, number: int = 0) -> Tensor:
        """The flat vector of initial model `number`: `init_from`'s, else drawn in a stream of its own."""
        return self._first(seed, number)[: self.layout.size]

    def initial_buffers(self, seed: int) -> Tensor | None:
        """The buffers ``[Q]`` of initial model 0 where buffers are not exchanged; None where they are, or are none."""
        return None if self.buffer_layout is None else self._first(seed, 0)[self.layout.size :].clone()

    def fill(self, network: nn.Module, model: Tensor, buffers: Tensor | None = None) -> nn.Module:
        """Copies a flat model, and buffers ``[Q]`` that are not exchanged, into a network like this one; returns it.

        Buffers that are not persistent are as in a new network: what the last run left there is another client's.
        """
        self.layout.unpack(model, network)
        for place, name, first in self._unkept:
            _renew(network.get_submodule(place), name, first)
        if buffers is not None:
            assert self.buffer_layout is not None, "these buffers are part of the model"
            self.buffer_layout.unpack(buffers, network)
        return network

    @property
    def initial_fingerprint(self) -> str | None:
        """SHA-256 (hex) of the weights that `init_from` gave, whatever the file's name; None without one."""
        return None if self._initial is None else hashlib.sha256(self._initial.numpy().data).hexdigest()

    def validation_step(self, batch: Batch, batch_idx: int = 0) -> None:
        """Logs ``val/loss`` and the metrics; called by ``lightning.Trainer`` only."""
        self._trainer_step("val", batch)

    def test_step(self, batch: Batch, batch_idx: int = 0) -> None:
        """Logs ``test/loss`` and the metrics; called by ``lightning.Trainer`` only."""
        self._trainer_step("test", batch)

    def predict_step(self, batch: Batch | Tensor, batch_idx: int = 0) -> Tensor:
        """The predicted labels ``[B]`` of a batch."""
        inputs = batch if isinstance(batch, Tensor) else batch[0]
        labels: Tensor = self(inputs).argmax(dim=1)
        return labels

    def _first(self, seed: int, number: int) -> Tensor:
        if self._initial is not None:
            return self._initial.clone()
        with rng.scope(seed, "init", number):
            return self._whole.pack(self.make_network())

    def _trainer_step(self, stage: str, batch: Batch) -> None:
        inputs, targets = batch
        scores = self(inputs)
        metrics = self.trainer_metrics[f"{stage}_"]
        assert isinstance(metrics, MetricCollection)
        metrics.update(scores, targets)
        self.log(f"{stage}/loss", self.loss(scores, targets), batch_size=len(targets))
        self.log_dict(dict(metrics.items(keep_base=False)), batch_size=len(targets))


def _never() -> bool:
    return False


def loss_of_step(module: FederatedModule, batch: Batch, number: int = 0) -> Tensor:
    """The loss that `training_step` returns for a batch, by itself or as the ``loss`` of a dict.

    Raises:
        ValueError: if it returns something else than one number.
    """
    found: Any = module.training_step(batch, number)
    loss = found.get("loss") if isinstance(found, dict) else found
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(found).__name__
        raise ValueError(
            f"{type(module).__name__}.training_step: got {got}; it must return the loss, a tensor of one number, or "
            'a dict that has it as "loss".'
        )
    return loss


@torch.no_grad()
def _renew(layer: nn.Module, name: str, first: Tensor | None) -> None:
    """Gives a buffer its first value: in place where that can be, for other layers and views may look at it."""
    now = layer._buffers.get(name)
    if first is None or now is None:
        layer._buffers[name] = None if first is None else first.to(next(layer.parameters(), first).device, copy=True)
    elif now.requires_grad or (now.shape, now.dtype) != (first.shape, first.dtype):
        layer._buffers[name] = first.to(now.device, copy=True)
    else:
        now.copy_(first)
