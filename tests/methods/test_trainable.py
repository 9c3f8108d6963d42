"""Every method trains, sends and keeps only the trained part of a network."""

import pytest
import torch

from lcfl.models.module import FederatedModule
from tests.helpers import fits
from tests.helpers.builders import Pretrained
from tests.helpers.commandline import ELSE, KIND_OF_METHOD

NETWORK = ["--model.network=tests.helpers.builders.Pretrained", '--model.trainable=["*adapter", decision]']
OPTIONS = {"ascfl": ["--data.proxy=40"], "ascfl_no_lowrank": ["--data.proxy=40"]} | ELSE


@pytest.mark.parametrize("engine", ["sequential", pytest.param("stacked", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", KIND_OF_METHOD)
def test_every_method_trains_two_rounds(tmp_path, method, engine):
    words = *NETWORK, *OPTIONS.get(method.stem, ()), f"--trainer.engine={engine}"
    run = fits.fit(tmp_path, method.stem, 1, 2, *words)
    state = fits.newest_state(run.path)
    assert state.initial.shape == (144,) and state.centres.shape[1] == 144 and state.frozen.shape == (258,)
    module = FederatedModule(Pretrained, trainable=["*adapter", "decision"])
    assert torch.equal(state.initial, module.initial_model(0))
    assert torch.equal(state.frozen, module.initial_frozen(0))
    models = [state.global_model, *state.centres, *(state.clients[client].model for client in state.clients)]
    assert any(model is not None and not torch.equal(model, state.initial) for model in models)
