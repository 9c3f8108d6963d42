"""Adapters are what is trained, sent, clustered and personalised, with every method."""

import sys
from functools import partial

import pytest
import torch

from lcfl.models import MLP, lora
from lcfl.models.module import FederatedModule
from lcfl.models.pretrained import load_weights
from tests.helpers import fits
from tests.helpers.commandline import CONFIGS, ELSE

NOT_SLOW = ("fedavg", "fedper", "ifca", "lcfed")
METHODS = [
    pytest.param(path.stem, marks=[] if path.stem in NOT_SLOW else [pytest.mark.slow])
    for path in sorted((CONFIGS / "methods").glob("*.yaml"))
]
NETWORK = (
    "--model.network={class_path: lcfl.models.lora, init_args: {target_modules: [fc1], rank: 2, also_train: [decision],"
    " network: {class_path: lcfl.models.MLP, init_args: {in_features: 16, hidden: [12], num_classes: 8}}}}"
)
SIZE = 2 * (16 + 12) + 8 * 12 + 8


def adapted(**options):
    options = {"target_modules": ["fc1"], "rank": 2, "also_train": ["decision"], **options}
    return lora(partial(MLP, 16, [12], 8), **options)


def test_adapters_and_named_layers_are_trained_and_begin_with_no_effect():
    pytest.importorskip("peft")
    network = adapted(alpha=6)
    assert [name for name, each in network.named_parameters() if each.requires_grad] == [
        *("embedding.fc1.lora_A.default.weight", "embedding.fc1.lora_B.default.weight"),
        *("decision.weight", "decision.bias"),
    ]
    layer, inputs = network.embedding.fc1, torch.randn(5, 16)
    assert torch.equal(layer(inputs), layer.base_layer(inputs))
    with torch.no_grad():
        layer.lora_B.default.weight.normal_()
    expected = layer.base_layer(inputs) + 6 / 2 * inputs @ layer.lora_A.default.weight.T @ layer.lora_B.default.weight.T
    torch.testing.assert_close(layer(inputs), expected)


def test_weights_of_the_network_without_adapters_are_loaded(tmp_path):
    pytest.importorskip("peft")
    torch.save(MLP(16, [12], 8).state_dict(), tmp_path / "weights.pt")
    network = adapted()
    with pytest.raises(ValueError, match=r"it lacks embedding.fc1.lora_A.default.weight, .*init_except"):
        load_weights(network, tmp_path / "weights.pt")
    load_weights(network, tmp_path / "weights.pt", ["*lora_*"])
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert torch.equal(network.embedding.fc1.base_layer.weight, saved["embedding.fc1.weight"])
    assert torch.equal(network.decision.weight, saved["decision.weight"])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_adapters(tmp_path, method):
    pytest.importorskip("peft")
    more = [*ELSE.get(method, ()), *["--data.proxy=40"] * method.startswith("ascfl")]
    run = fits.fit(tmp_path, method, 1, 2, NETWORK, "--trainer.engine=sequential", *more)
    state = fits.newest_state(run.path)
    assert state.initial.shape == (SIZE,) and state.frozen.shape == (12 * 16 + 12,)
    exchange, local_update = run._method.exchange, run._method.local_update
    # A model of another kind would need the data of its client.
    kind = next(kind for kind in exchange.models if exchange.evaluation_update(kind, local_update) is None)
    network = run.model(kind, client=int(state.participated.nonzero()[0]))
    assert not torch.equal(network.embedding.fc1.lora_B.default.weight, torch.zeros(12, 2))
    assert torch.equal(network.embedding.fc1.base_layer.weight.flatten(), state.frozen[: 12 * 16])


def test_stacked_clients_train_the_same_adapters(tmp_path):
    pytest.importorskip("peft")
    runs = [
        fits.fit(tmp_path / name, "lcfed", 1, 2, NETWORK, f"--trainer.engine={name}")
        for name in ("sequential", "stacked")
    ]
    models = [fits.newest_state(run.path).global_model for run in runs]
    torch.testing.assert_close(*models, atol=1e-5, rtol=1e-4)


def test_layers_that_do_not_exist_are_refused_with_those_that_do():
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=r"target_modules: got \['query'\], .* MLP are embedding.fc1, decision\."):
        adapted(target_modules=["query"])
    with pytest.raises(ValueError, match=r"also_train: the network MLP has no layer or parameter 'head'"):
        adapted(also_train=["head"])


def test_only_adapters_are_sent(tmp_path):
    pytest.importorskip("peft")
    module = FederatedModule(adapted, cut="decision")
    assert (module.layout.num_parameters, module.layout.num_embedding) == (SIZE, 2 * (16 + 12))


def test_without_peft_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"lcfl.models.lora needs the package peft: pip install 'lcfl\[lora\]'"):
        adapted()
