"""What is frozen is in no flat vector and in no optimizer, and training changes none of it."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lcfl.distributed.client_output import ClientError
from lcfl.engines.vmapped import VmappedModule
from lcfl.models import Layout, SplitNetwork
from lcfl.models.frozen import frozen_layers, set_trainable
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import Pulls
from tests.helpers.builders import Normed, Pretrained, blobs, engine, fedavg, fit, linear, loaded, named_engine

NAMES = ["adapter.weight", "adapter.bias", "decision.weight", "decision.bias"]


def pretrained(**options):
    return FederatedModule(Pretrained, **{"trainable": ["adapter", "decision"], **options})


def test_the_layout_holds_what_is_trained_and_another_one_the_rest():
    module = pretrained()
    assert module.layout.names == NAMES and module.layout.layers == ("adapter", "decision")
    assert (module.layout.num_embedding, module.layout.size, module.buffer_layout) == (72, 144, None)
    assert module.frozen_layout.names == [
        *("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "middle.1.weight", "middle.1.bias"),
        *("body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"),
        *("middle.0.running_mean", "middle.0.running_var", "middle.0.num_batches_tracked"),
    ]
    assert [id(each) for each in module.configure_optimizers().param_groups[0]["params"]] == [
        id(each) for each in module.trained_parameters()
    ]
    whole = FederatedModule(Pretrained)
    assert whole.frozen_layout is None and whole.initial_frozen(0) is None and whole.frozen_fingerprint is None
    assert module.layout.size + module.frozen_layout.size == whole.layout.size


def test_without_patterns_the_network_says_what_is_frozen():
    def network():
        made = linear()
        made.embedding.bias.requires_grad_(False)
        return made

    module = FederatedModule(network)
    assert module.layout.names == ["embedding.weight", "decision.weight", "decision.bias"]
    assert module.frozen_layout.names == ["embedding.bias"]
    assert FederatedModule(network, trainable=["*bias"]).layout.names == ["embedding.bias", "decision.bias"]


class Nested(nn.Module):
    """Normalisation layers with and without parameters, in a module of their own and beside others."""

    def __init__(self):
        super().__init__()
        self.own = nn.BatchNorm1d(2)
        self.block = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2, affine=False)))
        self.alone = nn.BatchNorm1d(2, affine=False)


@pytest.mark.parametrize(
    ("trainable", "layers"),
    [
        (None, []),
        (["own", "block"], []),
        (["own"], ["block.1.0"]),
        (["own.bias"], ["block.1.0"]),
        (["block.0.bias"], ["own"]),
    ],
)
def test_buffers_are_frozen_with_the_parameters_of_their_layer_or_of_the_module_around_it(trainable, layers):
    network = Nested()
    set_trainable(network, trainable)
    assert frozen_layers(network) == layers


def test_a_layer_with_frozen_buffers_stays_in_evaluation_mode():
    module = pretrained().train()
    modes = {name: layer.training for name, layer in module.network.named_modules() if name}
    assert [name for name, training in modes.items() if not training] == ["body.1", "middle.0"]
    module.eval()
    assert not any(layer.training for layer in module.modules())


@pytest.mark.parametrize("trainable", [[], None])
def test_nothing_to_train_is_refused(trainable):
    def network():
        return linear().requires_grad_(False)

    with pytest.raises(ValueError) as error:
        FederatedModule(network, trainable=trainable)
    assert f"model.trainable: got {trainable}, so no parameter of the network SplitNetwork is trained" in str(
        error.value
    )
    assert "its layers, which are embedding, decision." in str(error.value)


def test_patterns_of_no_layer_are_refused():
    with pytest.raises(
        ValueError, match=r"model.trainable: the network SplitNetwork has no layer or parameter 'fc'; i"
    ):
        FederatedModule(linear, trainable=["decision", "fc"])


def test_a_trained_parameter_must_be_float32_and_a_frozen_one_need_not():
    def network():
        made = linear()
        made.embedding.half()
        return made

    with pytest.raises(ValueError, match=r"parameter 'embedding.weight' is torch.float16"):
        FederatedModule(network)
    module = FederatedModule(network, trainable=["decision"])
    module.frozen_layout.unpack(module.initial_frozen(0), module.network)
    assert module.network.embedding.weight.dtype == torch.float16


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_changes_what_is_trained_alone_and_the_pulls_reach_it(optimizer):
    module = pretrained(optimizer=partial(optimizer, lr=0.1, weight_decay=0.1), cluster_weight=0.5, global_weight=0.5)
    sequential = engine(module, loaded(blobs()))
    before = {name: each.clone() for name, each in sequential.module.network.state_dict().items()}
    start = module.initial_model(0)
    pulls = Pulls(start + 1, start[:72] + 2)
    result = sequential.run_optimizer(start, [np.arange(8)] * 3, pulls)
    after = sequential.module.network.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(NAMES)
    assert (result.model != start).all()
    gradient = sequential.gradient(start, np.arange(8), pulls=pulls).vector
    plain = sequential.gradient(start, np.arange(8)).vector
    expected = torch.full((144,), -0.5) - torch.cat([torch.ones(72), torch.zeros(72)])
    torch.testing.assert_close(gradient - plain, expected, atol=1e-5, rtol=1e-5)


def test_models_that_train_at_once_share_what_is_frozen():
    mapped = VmappedModule(pretrained())
    models = torch.stack([mapped.module.initial_model(0, number) for number in range(3)])
    stacked = mapped.parameters(models)
    assert {name: len(each) for name, each in stacked.items()} == dict.fromkeys(NAMES, 3)
    assert mapped.buffers(models[:, 144:]) == {}
    before = mapped.module.frozen_part()
    output = mapped.step(stacked, {}, torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.int64))
    output.losses.sum().backward()
    assert all(each.grad is not None for each in stacked.values())
    assert all(each.grad is None for each in mapped.module.network.parameters())
    assert torch.equal(mapped.module.frozen_part(), before)


def test_a_frozen_body_has_no_graph():
    module = pretrained().train()
    outputs = []
    module.network.body.register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    module(torch.randn(4, 16))
    assert not outputs[0].requires_grad


def test_every_initial_model_has_the_frozen_part_of_the_first():
    module = pretrained()
    models = [module.initial_model(3, number) for number in (0, 1)]
    assert not torch.equal(*models)
    network = module.fill(Pretrained(), models[1], frozen=module.initial_frozen(3))
    first = FederatedModule(Pretrained)
    first.fill(first.network, first.initial_model(3))
    assert torch.equal(network.body[0].weight, first.network.body[0].weight)
    assert not torch.equal(network.adapter.weight, first.network.adapter.weight)


def test_a_replica_shares_what_is_frozen_and_nothing_else():
    module = pretrained()
    copied = module.replica()
    for name, each in module.network.named_parameters():
        shares = each.data_ptr() == copied.network.get_parameter(name).data_ptr()
        assert shares is (name not in NAMES), name
    assert copied.network.body[1].running_mean is module.network.body[1].running_mean


def test_a_cut_by_patterns_puts_the_head_last_wherever_it_is():
    layout = Layout.from_network(Normed(), ["embedding.1", "decision.bias"])
    assert layout.names[:6] == [
        *("embedding.0.weight", "embedding.0.bias", "decision.weight"),
        *("embedding.1.weight", "embedding.1.bias", "decision.bias"),
    ]
    assert layout.num_embedding == 9 + 6 and layout.layers == ("embedding.0", "embedding.1", "decision")
    network, other = Normed(), Normed()
    assert torch.equal(layout.pack(layout.unpack(layout.pack(network), other)), layout.pack(network))
    assert Layout.from_network(Normed(), ["decision"]) == Layout.from_network(Normed(), "decision")
    assert Layout.from_network(Normed(), []) == Layout.from_network(Normed(), None)
    with pytest.raises(ValueError, match=r"model.cut: the network Normed has no layer or parameter 'fc'"):
        Layout.from_network(Normed(), ["fc"])


def test_the_head_may_be_frozen():
    assert FederatedModule(linear, trainable=["embedding"]).layout.num_embedding == 9
    assert FederatedModule(linear, trainable=["decision"]).layout.num_embedding == 0
    assert FederatedModule(linear, trainable=["decision"], cut=["embedding"]).layout.num_embedding == 8


class Teaching(nn.Module):
    """A frozen teacher follows the student as both train."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(16, 8), nn.Linear(16, 8).requires_grad_(False)
        self.decision = nn.Linear(8, 8)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.teacher.weight.mul_(0.9).add_(self.student.weight, alpha=0.1)
        return self.decision(self.student(x) + self.teacher(x))


def test_a_frozen_part_that_changes_in_training_is_refused(tmp_path):
    with pytest.raises(ClientError, match="Teaching changes its frozen part as it trains"):
        fit(FederatedModule(Teaching), blobs(4), fedavg(), tmp_path)


def test_a_complex_parameter_is_refused():
    def network():
        made = linear()
        made.embedding.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
        return made

    with pytest.raises(ValueError, match=r"parameter 'embedding\.phase' is complex"):
        FederatedModule(network)


class Shuffled(SplitNetwork):
    """The linear network, which registers its decision head first."""

    def __init__(self):
        super().__init__(nn.Linear(16, 6), nn.Linear(6, 8))
        self._modules = {name: self._modules[name] for name in ("decision", "embedding")}


def results(name, network, cut):
    """Returns a trained model, a gradient and a Hessian-vector product of a network, by an engine."""
    data = loaded(blobs())
    options = {"cut": cut, "cluster_weight": 0.3, "global_weight": 0.7}
    module = FederatedModule(network, partial(torch.optim.SGD, lr=0.1, momentum=0.5), **options)
    made = named_engine(name, module, data)
    start, direction = torch.linspace(-1, 1, module.layout.size), torch.linspace(0, 1, module.layout.size)
    pulls, batches = Pulls(start.flip(0), torch.ones(module.layout.num_embedding)), [np.arange(8), np.arange(8, 16)]

    def task(each):
        return (
            each.run_optimizer(start, batches, pulls).model,
            each.gradient(start, batches[0], pulls=pulls).vector,
            each.hessian_vector_product(start, batches[0], direction).vector,
        )

    return made.run_all([task, task])[1]


@pytest.mark.parametrize("name", ["sequential", "stacked", "compiled"])
def test_the_layout_decides_the_order_in_every_engine(name):
    found, expected = results(name, Shuffled, ["decision"]), results(name, partial(linear, (16, 6, 8)), "decision")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
