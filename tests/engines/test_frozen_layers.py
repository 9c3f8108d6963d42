"""The compiled engine trains networks with frozen layers."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lcfl.data.spec import SampleSpec
from lcfl.engines import CompiledEngine
from lcfl.engines.compiled import check_compiled
from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.tracing import trace
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import Pulls
from tests.engines.dropping_networks import Dropping
from tests.engines.networks import NETWORKS, SHAPE, Frozen, Inner, Normal, Tiled
from tests.engines.pairs import near
from tests.engines.test_compiled import TOLERANCE, batches_of, engines


class Between(nn.Module):
    """Two branches, of which one can be frozen; the trained layers can be before and behind the frozen ones."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 18, 3, padding=1), nn.BatchNorm2d(18), nn.ReLU())
        self.left = nn.Sequential(nn.Conv2d(18, 18, 3, padding=1), nn.BatchNorm2d(18, affine=False))
        self.right = nn.Sequential(nn.Conv2d(18, 18, (1, 3), padding=(0, 1)), nn.GroupNorm(2, 18))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.hidden = nn.Sequential(nn.Linear(18, 21), nn.BatchNorm1d(21), nn.Tanh(), nn.Linear(21, 7))
        self.decision = nn.Linear(7, 4)

    def forward(self, x):
        x = self.first(x)
        return self.decision(self.hidden(self.pool(self.left(x) + self.right(x)).flatten(1)))


CASES = [
    (Between, ["decision"]),
    (Between, ["first.0", "decision"]),  # the normalisation after it is frozen
    (Between, ["right", "hidden.1"]),
    (Between, ["first.1", "right.1", "hidden.1"]),  # the normalisations alone
    (Between, ["hidden"]),  # the decision head is frozen
    (Normal, ["embedding.5", "decision"]),
    (Tiled, ["norm", "five", "decision"]),
    (Dropping, ["decision"]),
]


def frozen_engines(network, trainable, **options):
    """Makes both engines, with the same frozen values."""
    pair = engines(network, SHAPE, partial(torch.optim.SGD, lr=0.1, momentum=0.9), trainable=trainable, **options)
    assert type(pair[1]) is CompiledEngine
    return pair


def values(engine, size):
    """Returns what an engine computes from a batch of this size, and what it leaves."""
    module = engine.module
    model, layout = module.initial_model(3), module.layout
    pulls = Pulls(near(model)[: layout.num_parameters], near(model)[: layout.num_embedding])
    parts = ("embedding", "head") if 0 < layout.num_embedding < layout.num_parameters else ("all",)
    engine.buffers = module.initial_buffers(3)
    with engine.seeded(0, "test"):
        trained = engine.run_optimizer(model, batches_of(size, size, 5), pulls)
        apart = [engine.run_optimizer(model, batches_of(size), pulls, part=each) for each in parts]
        found = engine.gradient(model, *batches_of(size), pulls=pulls)
    inputs, _ = engine.samples.batch(np.arange(9), torch.device("cpu"))
    buffers = torch.zeros(0) if engine.buffers is None else engine.buffers
    losses = torch.tensor([trained.loss, found.loss, *[each.loss for each in apart]])
    models = torch.stack([trained.model, *[each.model for each in apart]])
    return models, found.vector, found.buffers, buffers, losses, engine.scorer(model)(inputs)


@pytest.mark.parametrize("policy", ["average", "local"])
@pytest.mark.parametrize("size", [7, 32])
@pytest.mark.parametrize(("network", "trainable"), CASES)
def test_trains_what_is_not_frozen(network, trainable, size, policy):
    pair = frozen_engines(network, trainable, buffer_policy=policy, cluster_weight=0.3, global_weight=0.2)
    frozen = pair[1].module.frozen_part()
    for expected, actual in zip(*(values(engine, size) for engine in pair), strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE)
    assert torch.equal(pair[1].module.frozen_part(), frozen)


def test_a_frozen_normalisation_trains_with_one_sample():
    pair = frozen_engines(Between, ["first.0", "decision"])
    for expected, actual in zip(*(values(engine, 1) for engine in pair), strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_every_network_with_its_decision_alone():
    """All frozen kinds of layers."""
    for network, shape in NETWORKS.values():
        pair = engines(network, shape, trainable=["decision*"])
        model = pair[0].module.initial_model(3)
        expected, actual = (engine.run_optimizer(model, batches_of(9, 9)) for engine in pair)
        torch.testing.assert_close(actual.model, expected.model, **TOLERANCE)


class Versioned(Inner):
    """Its body has a buffer. If it is frozen, the body stays in evaluation mode and drops nothing."""

    def __init__(self):
        super().__init__()
        self.body.register_buffer("version", torch.ones(1))
        self.body.append(nn.Dropout(0.5))


class Sharing(nn.Module):
    """Two normalisations with the same statistics, of which only the first is frozen."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.decision = nn.BatchNorm1d(7), nn.BatchNorm1d(7, affine=False), nn.Linear(7, 4)
        self.two.running_mean, self.two.running_var = self.one.running_mean, self.one.running_var
        self.two.num_batches_tracked = self.one.num_batches_tracked

    def forward(self, x):
        return self.decision(self.two(self.one(x)))


@pytest.mark.parametrize(
    ("network", "why"),
    [
        (Versioned, "its layer body is frozen and has buffers"),
        (Sharing, "BatchNorm1d is frozen in part, or shares its"),
    ],
)
def test_refuses_layers_whose_mode_a_trace_does_not_show(network, why):
    made = FederatedModule(network, partial(torch.optim.SGD, lr=0.1), trainable=["decision"])
    with pytest.raises(Unsupported, match=why):
        check_compiled(made, SampleSpec((7,), torch.float32, 4))


@pytest.mark.parametrize(("trainable", "is_trained"), [(None, False), (["decision"], False), (["decision"], True)])
def test_refuses_layers_that_are_frozen_or_trained_after_the_module_was_made(trainable, is_trained):
    """The layouts are those of the module as it was made."""
    made = FederatedModule(Between, partial(torch.optim.SGD, lr=0.1), trainable=trainable)
    made.network.hidden.requires_grad_(is_trained)
    if trainable:
        made.network.decision.requires_grad_(is_trained)
    with pytest.raises(Unsupported, match=f"its parameter .* was {'un' * is_trained}frozen after the module was made"):
        check_compiled(made, SampleSpec(SHAPE, torch.float32, 4))


def test_refuses_a_layer_that_is_frozen_in_part():
    with pytest.raises(Unsupported, match="its Linear is frozen in part"):
        trace(Frozen(), (7,))
