"""Weights from a file are loaded completely but for named exceptions, or not at all and with a reason."""

import functools
import sys
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torchvision
from torch import nn

from lcfl.models import MLP, Layout
from lcfl.models.module import FederatedModule
from lcfl.models.pretrained import load_weights
from tests.helpers.builders import Normed, linear, linear_module


def saved(tmp_path, content):
    path = tmp_path / "weights.pt"
    torch.save(content, path)
    return path


def test_parameters_and_buffers_are_loaded(tmp_path):
    trained, other = Normed(), Normed()
    trained(torch.randn(8, 2))
    load_weights(other, saved(tmp_path, trained.state_dict()))
    layout = Layout.from_network(trained)
    assert torch.equal(layout.pack(other), layout.pack(trained))
    assert int(other.embedding[1].num_batches_tracked) == 1


def state(**changes):
    """Returns the state dict of MLP(4, [3], 2) with some entries replaced; None leaves an entry out."""
    content = OrderedDict(MLP(4, [3], 2).state_dict()) | {name.replace("__", "."): v for name, v in changes.items()}
    return {name: value for name, value in content.items() if value is not None}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            state(decision__weight=None, decision__bias=None),
            r"the network MLP: it lacks decision.weight, decision.bias\.",
        ),
        (state(head__weight=torch.zeros(1)), r"the network has no head.weight\."),
        (
            state(decision__weight=torch.zeros(5, 3), decision__bias=torch.zeros(5)),
            r"decision.weight has shape \(5, 3\) instead of \(2, 3\); decision.bias has shape \(5,\) instead of \(2,\)",
        ),
        (
            nn.Linear(4, 2).state_dict(),
            "it lacks embedding.fc1.weight, embedding.fc1.bias, decision.weight and 1 more; the network has no weight, "
            r"bias. Set model.network .*, or name .* e.g. model.init_except=\[embedding.fc1\]",
        ),
        ({"weights": state(), "epoch": 3}, "holds entries weights, epoch, not a state dict of tensors"),
        ([torch.zeros(3)], "holds a list, not a state dict of tensors"),
        (MLP(4, [3], 2), r"cannot be read as weights .*torch.save\(network.state_dict\(\), path\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_loaded(tmp_path, content, words):
    network = MLP(4, [3], 2)
    before = Layout.from_network(network).pack(network)
    with pytest.raises(ValueError, match=rf"(?s)model.init_from: .*weights.pt .*{words}"):
        load_weights(network, saved(tmp_path, content))
    assert torch.equal(Layout.from_network(network).pack(network), before)


def test_missing_files_and_files_of_another_format_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file '.*nowhere.pt'"):
        load_weights(MLP(4), tmp_path / "nowhere.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        load_weights(MLP(4), tmp_path / "text.pt")


def test_a_state_dict_in_memory_is_like_its_file_and_is_copied(tmp_path):
    trained = Normed()
    of_file = FederatedModule(Normed, init_from=saved(tmp_path, trained.state_dict()))
    given = FederatedModule(Normed, init_from=trained.state_dict())
    for parameter in trained.parameters():
        parameter.data.zero_()
    assert torch.equal(given.initial_model(0), of_file.initial_model(0))
    assert given.initial_fingerprint == of_file.initial_fingerprint


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        (state(decision__bias=None), ValueError, r"the given state dict does not fit the network MLP: it lacks"),
        ({"epoch": 3}, ValueError, "the given state dict holds entries epoch, not a state dict of tensors"),
        (
            MLP(4, [3], 2),
            TypeError,
            r"got MLP; it must be a file .* or the state dict itself",
        ),
    ],
)
def test_what_is_no_state_dict_of_the_network_is_refused(weights, error, words):
    with pytest.raises(error, match=rf"^model\.init_from: {words}"):
        FederatedModule(partial(MLP, 4, [3], 2), init_from=weights)


def prefixed(prefix, content):
    return {prefix + name: value for name, value in content.items()}


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda content: {"state_dict": content, "epoch": 3},
        lambda content: {"model": content},
        lambda content: prefixed("module.", content),
        lambda content: {"state_dict": prefixed("model.", content), "hyper_parameters": {"lr": 0.1}},
    ],
    ids=["state_dict", "model", "module.", "Lightning"],
)
def test_weights_in_a_wrapper_are_found(tmp_path, wrapped):
    network = MLP(4, [3], 2)
    given = load_weights(network, saved(tmp_path, wrapped(state(decision__bias=torch.tensor([1.0, 2.0])))))
    assert network.decision.bias.tolist() == [1, 2] and list(given) == list(network.state_dict())


def test_a_checkpoint_of_lightning_may_hold_a_loss_with_weights(tmp_path):
    module = FederatedModule(partial(MLP, 4, [3], 2), loss=nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])))
    assert "loss.weight" in module.state_dict()
    network, expected = MLP(4, [3], 2), module.network.state_dict()
    given = load_weights(network, saved(tmp_path, {"state_dict": module.state_dict()}))
    assert list(given) == list(expected) and all(torch.equal(given[name], expected[name]) for name in expected)
    other = prefixed("model.", state()) | {"loss.weight": torch.ones(2)}  # of another LightningModule
    with pytest.raises(ValueError, match=r"model\.init_except=\["):
        load_weights(network, saved(tmp_path, other))
    assert len(load_weights(network, saved(tmp_path, other), ["loss"])) == 4
    with pytest.raises(ValueError, match="has 'los'"):
        load_weights(network, saved(tmp_path, other), ["loss", "los"])


class Wrapped(nn.Module):
    """A network in another one, with an adapter that changes the names as peft does."""

    def __init__(self):
        super().__init__()
        self.model = MLP(4, [3], 2)
        self.model.decision = nn.ModuleDict({"base_layer": nn.Linear(3, 2), "lora_A": nn.Linear(3, 2)})


def test_names_of_a_wrapper_and_of_adapters_are_left_out(tmp_path):
    network, content = Wrapped(), state()
    given = load_weights(network, saved(tmp_path, content), ["*lora_*"])
    assert torch.equal(network.model.decision["base_layer"].weight, content["decision.weight"])
    assert torch.equal(network.model.embedding.fc1.bias, content["embedding.fc1.bias"])
    assert "model.decision.base_layer.weight" in given and len(given) == 4


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "model.model.", "module.model.", "model.module."])
@pytest.mark.parametrize("network", [partial(MLP, 4, [3], 2), Wrapped], ids=["plain", "wrapped"])
def test_first_components_that_all_names_share_may_differ(tmp_path, network, prefix):
    content, network = state(), network()
    load_weights(network, saved(tmp_path, prefixed(prefix, content)), ["*lora_*"] * isinstance(network, Wrapped))
    for name, value in network.state_dict().items():
        plain = name.removeprefix("model.").replace("base_layer.", "")
        assert plain not in content or torch.equal(value, content[plain]), name


def test_exceptions_keep_what_they_have(tmp_path):
    network, file = MLP(4, [3], 5), saved(tmp_path, state(old__head=torch.zeros(7)))
    before = network.decision.weight.clone()
    with pytest.raises(ValueError, match=r"the network has no old.head; decision.weight has shape"):
        load_weights(network, file)
    given = load_weights(network, file, ["decision", "old"])
    assert sorted(given) == ["embedding.fc1.bias", "embedding.fc1.weight"]
    assert torch.equal(network.decision.weight, before)
    assert torch.equal(network.embedding.fc1.weight, given["embedding.fc1.weight"])
    with pytest.raises(ValueError, match=r"model.init_except: neither the network MLP nor .* has 'fc'\."):
        load_weights(network, file, ["decision", "old", "fc"])
    with pytest.raises(ValueError, match=r"model.init_except: got the text 'fc'; it must be a list"):
        load_weights(network, file, "fc")


def test_another_head_is_drawn_for_each_initial_model(tmp_path):
    module = linear_module(init_from=saved(tmp_path, linear().state_dict()), init_except=["decision"])
    first, second = (module.initial_model(0, number) for number in (0, 1))
    assert torch.equal(first[:9], second[:9]) and not torch.equal(first[9:], second[9:])
    assert torch.equal(first[9:], linear_module().initial_model(0)[9:])
    whole = linear_module(init_from=tmp_path / "weights.pt")
    assert torch.equal(first[:9], whole.initial_model(5)[:9])
    assert module.initial_fingerprint != whole.initial_fingerprint


def test_files_of_safetensors_are_read(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    trained, network = Normed(), Normed()
    trained(torch.randn(8, 2))
    save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    load_weights(network, tmp_path / "weights.safetensors")
    layout = Layout.from_network(network)
    assert torch.equal(layout.pack(network), layout.pack(trained))
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        load_weights(network, tmp_path / "text.safetensors")


def test_without_the_package_safetensors_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"needs the package safetensors: pip install 'lcfl\[pretrained\]'"):
        load_weights(MLP(4), tmp_path / "weights.safetensors")


def test_a_network_of_torchvision_gets_another_head(tmp_path):
    path = saved(tmp_path, torchvision.models.squeezenet1_1(num_classes=7).state_dict())
    network = torchvision.models.squeezenet1_1(num_classes=3)
    with pytest.raises(ValueError, match=r"classifier.1.weight has shape \(7, .* model.init_except=\[classifier.1\]"):
        load_weights(network, path)
    given = load_weights(network, path, ["classifier.1"])
    assert set(network.state_dict()) - set(given) == {"classifier.1.weight", "classifier.1.bias"}


def test_a_network_of_timm_gets_another_head(tmp_path):
    timm = pytest.importorskip("timm")
    path = saved(tmp_path, timm.create_model("resnet10t", num_classes=7).state_dict())
    module = FederatedModule(
        functools.partial(timm.create_model, "resnet10t", num_classes=3), cut="fc", init_from=path, init_except=["fc"]
    )
    assert module(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    assert module.layout.num_parameters - module.layout.num_embedding == 3 * 512 + 3
