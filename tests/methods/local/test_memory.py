"""What a local update remembers for a client is there when the client takes part again, also in a resumed run."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from lcfl.core.messages import Downlink
from lcfl.core.schema import Forms
from lcfl.core.state import FederationState
from lcfl.federation.federation import Federation
from lcfl.methods.aggregation import ClusterMean, GlobalMean
from lcfl.methods.clustering.base import Clustering
from lcfl.methods.exchange import ClusterModel, FullModel
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from lcfl.models import MLP
from lcfl.models.module import FederatedModule
from tests.helpers.bits import assert_same_state
from tests.helpers.builders import blobs, blobs_module, fit


@dataclass(frozen=True)
class Averaging(LocalTraining):
    """Returns the mean of all models that the client has ever trained; its memory is their sum and their number."""

    def __call__(self, state, downlink, data, engine):
        output = super().__call__(state, downlink, data, engine)
        memory = torch.zeros(len(output.model) + 1) if state.memory is None else state.memory
        memory = memory + torch.cat([output.model, torch.ones(1)])
        return replace(output, model=memory[:-1] / memory[-1], memory=memory)


class Adam(GlobalMean):
    """Remembers a moment in an attribute, which no checkpoint holds, although `remembers` names it."""

    remembers: ClassVar[Forms] = {"moment": object}
    _moment = 0.0

    def __call__(self, state: FederationState, uploads, layout):
        super().__call__(state, uploads, layout)
        self._moment = 0.5 * self._moment + state.global_model


def method():
    return Method(Averaging(steps=3), FullModel(), GlobalMean())


def run(root, rounds, devices=1, client_store="memory", parts=None, **options):
    federation = Federation(
        rounds=rounds,
        clients_per_round=5,
        evaluate_every=0,
        accelerator="cpu",
        devices=devices,
        client_store=client_store,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=root,
        name="run",
    )
    return federation.fit(*(parts or (blobs_module(), blobs(), method())), **options).state


def test_a_client_gets_back_what_it_remembered(tmp_path):
    watch = fit(blobs_module(), blobs(), method(), tmp_path, rounds=3, clients_per_round=5)
    times = torch.zeros(12)
    for sampled in watch.sampled.values():
        times[sampled] += 1
    kept = [watch.state.clients[client].memory for client in range(12)]
    assert [0.0 if each is None else float(each[-1]) for each in kept] == times.tolist()


@pytest.mark.parametrize(("devices", "store"), [(1, "memory"), (2, "mapped")])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, devices, store):
    whole = run(tmp_path / "whole", 4)
    run(tmp_path, 2)
    assert_same_state(whole, run(tmp_path, 4, devices, store, ckpt_path="last"), but=("callbacks",))


@dataclass(frozen=True)
class Shared(LocalTraining):
    """Remembers models in an attribute of its class."""

    models: ClassVar[dict] = {}

    def __call__(self, state, downlink, data, engine):
        output = super().__call__(state, downlink, data, engine)
        self.models[data.client] = output.model
        return output


class Counting(FederatedModule):
    """Counts its steps, and has a layer that nothing trains."""

    _steps = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.teacher = nn.Linear(2, 2).requires_grad_(False)

    def training_step(self, batch, batch_idx=0):
        self._steps += 1
        return super().training_step(batch, batch_idx)


class Running(nn.CrossEntropyLoss):
    """Subtracts a running mean of the scores."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, scores, targets):
        self.mean = 0.9 * self.mean + 0.1 * scores.detach().mean(dim=0)
        return super().forward(scores - self.mean, targets)


class Fading(MLP):
    """Scales its scores by a number that grows from step to step."""

    calls = 0

    def forward(self, inputs):
        self.calls += self.training
        return super().forward(inputs) * (1 + 0.01 * self.calls)


NETWORK = partial(MLP, 16, [8], 8)


@pytest.mark.parametrize(
    ("module", "method", "changed"),
    [
        (blobs_module, Method(LocalTraining(steps=1), FullModel(), Adam()), "Adam has changed its attribute _moment"),
        (blobs_module, Method(Shared(steps=1), FullModel(), GlobalMean()), "Shared has changed its attribute models"),
        (partial(Counting, NETWORK), method(), "Counting has changed its attribute _steps"),
        (partial(FederatedModule, partial(Fading, 16, [8], 8)), method(), "Fading has changed its attribute calls"),
        (partial(FederatedModule, NETWORK, loss=Running()), method(), "Running has changed its attribute mean"),
    ],
)
def test_memory_that_no_checkpoint_holds_is_warned_of_once(tmp_path, module, method, changed):
    with pytest.warns(UserWarning, match=rf"{changed}, which no checkpoint holds") as caught:
        run(tmp_path, 4, parts=(module(), blobs(), method))
    assert sum("no checkpoint holds" in str(each.message) for each in caught) == 1


class Weighing(FederatedModule):
    """Makes equal attributes anew in every step."""

    def training_step(self, batch, batch_idx=0):
        self.scale, self.names = torch.ones(8), {"".join(["sc", "ale"]): "".join(["sc", "ale"])}
        return super().training_step(batch, batch_idx)


def test_equal_attributes_in_other_memory_are_no_change(tmp_path, recwarn):
    module = Weighing(NETWORK)
    module.scale, module.names = torch.ones(8), dict.fromkeys(["scale"], "scale")
    run(tmp_path, 2, parts=(module, blobs(), method()))
    assert not [each for each in recwarn if "no checkpoint holds" in str(each.message)]


@dataclass(frozen=True)
class Growing(LocalTraining):
    """Its memory is as long as the client's number."""

    def __call__(self, state, downlink, data, engine):
        return replace(super().__call__(state, downlink, data, engine), memory=torch.zeros(1 + data.client))


def test_memories_of_several_lengths_are_refused_in_the_round_in_which_they_arrive(tmp_path):
    with pytest.raises(ValueError, match=r"^client \d+: LocalOutput\.memory has \d+ numbers, and an earlier one has"):
        fit(blobs_module(), blobs(), Method(Growing(steps=1), FullModel(), GlobalMean()), tmp_path, rounds=1)


PARTICIPANTS = ClusterMean(over="participants", embedding_over="participants")


class Drawing(GlobalMean):
    """Adds noise from global generators, which a careful aggregation would not use."""

    def __call__(self, state: FederationState, uploads, layout):
        super().__call__(state, uploads, layout)
        state.global_model = state.global_model + 0.01 * torch.randn(layout.size) + np.float32(np.random.rand())
        state.centres = state.global_model[None]


class DrawingClusters(Clustering):
    """Draws the clusters from numpy's global generator."""

    def on_round_end(self, server, state, uploads):
        state.centres = state.global_model.repeat(3, 1)
        state.assignment = torch.from_numpy(np.random.randint(3, size=state.num_clients))


class DrawnDownlink(FullModel):
    """Sends a model with noise from a global generator."""

    def down(self, state, client, layout):
        return Downlink({"model": state.global_model + 0.01 * torch.randn(layout.size)})

    def evaluation_down(self, state, client, kind, layout):
        return self.down(state, client, layout)


@pytest.mark.parametrize(
    "method",
    [
        Method(LocalTraining(steps=1), FullModel(), Drawing()),
        Method(LocalTraining(steps=1), DrawnDownlink(), GlobalMean()),
        Method(LocalTraining(steps=1), ClusterModel(), PARTICIPANTS, [DrawingClusters()]),
    ],
)
def test_parts_that_draw_from_global_generators_give_the_same_numbers_when_resumed(tmp_path, method):
    def fitted(root, rounds, ckpt_path=None):
        federation = Federation(rounds=rounds, evaluate_every=1, devices=1, logger=False, default_root_dir=root)
        return federation.fit(blobs_module(), blobs(), method, ckpt_path)

    whole = fitted(tmp_path / "whole", 4)
    fitted(tmp_path, 2)
    for _ in ("a run that goes on", "a complete run, which is only evaluated"):
        torch.manual_seed(5), np.random.seed(5)
        resumed = fitted(tmp_path, 4, "last")
        assert_same_state(whole.state, resumed.state, but=("callbacks",))
        assert resumed.metrics == pytest.approx(whole.metrics, rel=0, abs=0, nan_ok=True)


class Broken(GlobalMean):
    """Divides by zero."""

    def __call__(self, state: FederationState, uploads, layout):
        super().__call__(state, uploads, layout)
        state.global_model = state.global_model / 0


def test_an_aggregation_whose_model_is_not_finite_is_named(tmp_path):
    with pytest.warns(UserWarning, match=r"^Broken: state\.global_model is not finite, although only finite uploads"):
        fit(blobs_module(), blobs(), Method(LocalTraining(steps=1), FullModel(), Broken()), tmp_path, rounds=1)
