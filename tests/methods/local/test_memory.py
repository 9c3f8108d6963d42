"""What a local update remembers for a client is there when the client takes part again, also in a resumed run."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from lcfl.core.schema import Forms
from lcfl.core.state import FederationState
from lcfl.federation.federation import Federation
from lcfl.methods.aggregation import GlobalMean
from lcfl.methods.exchange import FullModel
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
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


def run(root, rounds, devices=1, client_store="memory", **options):
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
    return federation.fit(blobs_module(), blobs(), method(), **options).state


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


def test_memory_that_no_checkpoint_holds_is_warned_of_once(tmp_path):
    federation = Federation(
        rounds=4, clients_per_round=5, accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path, name="run"
    )
    adam = Method(LocalTraining(steps=1), FullModel(), Adam())
    with pytest.warns(UserWarning, match="Adam has changed its attribute _moment, which no checkpoint holds") as caught:
        federation.fit(blobs_module(), blobs(), adam)
    assert sum("no checkpoint holds" in str(each.message) for each in caught) == 1
