"""What the stacked engine refuses, because the clients of a stack would not train as they do alone."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lcfl.data.spec import SampleSpec
from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.stacked import check_stacked
from lcfl.models import SplitNetwork
from lcfl.models.module import FederatedModule
from tests.engines.networks import SHAPE, CountingApart, CountingInPython, Normal, Plain
from tests.helpers.builders import without_gradients


class Deciding(FederatedModule):
    def training_step(self, batch, batch_idx=0):
        loss = super().training_step(batch, batch_idx)
        return loss if loss > 0 else -loss


class OwnOptimizer(FederatedModule):
    def configure_optimizers(self):
        return super().configure_optimizers()


def after(layer):
    """Returns a function that makes a network with this layer first."""
    return lambda: SplitNetwork(nn.Sequential(layer(), nn.Flatten()), nn.Linear(3 * 11 * 9, 4))


class HookedBackward(Plain):
    def __init__(self):
        super().__init__()
        self.embedding.register_full_backward_hook(lambda *args: None)


class Standardised(SplitNetwork):
    """Reads statistics of the batch. Weights of zero in the last layer hide them from the scores at first."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d(7, track_running_stats=False), nn.Linear(7, 4))
        nn.init.zeros_(self.decision.weight)


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.words = nn.Embedding(12, 6, **options)
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)
        self.decision = nn.Linear(6, 4)

    def forward(self, x):
        return self.decision(self.norm(self.words(x).mean(1)))


class MixedUp(FederatedModule):
    """Draws as mixup does."""

    draw = staticmethod(np.random.beta)

    def training_step(self, batch, batch_idx=0):
        inputs, targets = batch
        share = self.draw(0.4, 0.4)
        return self.loss(self(share * inputs + (1 - share) * inputs.flip(0)), targets)


class MixedByPython(MixedUp):
    draw = staticmethod(random.betavariate)


class CountingLoss(nn.CrossEntropyLoss):
    calls = 0

    def forward(self, scores, targets):
        self.calls += 1
        return super().forward(scores, targets) / self.calls


@pytest.mark.parametrize(
    ("made", "precision", "why"),
    [
        (partial(FederatedModule, after(partial(nn.Dropout, 0.5))), "32-true", "draws random numbers, as dropout does"),
        (
            partial(FederatedModule, after(partial(nn.BatchNorm2d, 3, track_running_stats=False))),
            "32-true",
            "in evaluation",
        ),
        (partial(FederatedModule, Normal), "bf16-mixed", r"torch\.vmap cannot map it"),
        (partial(FederatedModule, Plain), "16-mixed", "a loss scale for every client"),
        (partial(FederatedModule, Plain, torch.optim.LBFGS), "32-true", "the optimizer is LBFGS, not one that"),
        (partial(OwnOptimizer, Plain), "32-true", "OwnOptimizer defines its own configure_optimizers"),
        (partial(FederatedModule, Plain, without_gradients), "32-true", "the optimizer has hooks or a step of its own"),
        (partial(FederatedModule, HookedBackward), "32-true", "the network has hooks for its backward pass"),
        (partial(MixedUp, Plain), "32-true", r"draws from random or numpy\.random"),
        (partial(MixedByPython, Plain), "32-true", r"draws from random or numpy\.random"),
        (partial(FederatedModule, Plain, loss=CountingLoss()), "32-true", r"its step changes loss\.calls"),
        (partial(Deciding, Plain), "32-true", r"torch\.vmap cannot map it over clients \(RuntimeError: .*control"),
    ],
)
def test_refuses_modules_that_stacking_would_change(made, precision, why):
    with pytest.raises(Unsupported, match=why):
        check_stacked(made(), SampleSpec(SHAPE), precision)


@pytest.mark.parametrize(
    ("network", "spec"),
    [(Standardised, SampleSpec((7,))), (Words, SampleSpec((5,), torch.int64))],
)
def test_refuses_networks_whose_scores_depend_on_the_other_samples(network, spec):
    with pytest.raises(Unsupported, match="in evaluation the scores of one sample depend on the other samples"):
        check_stacked(FederatedModule(network), spec)


@pytest.mark.parametrize("option", [{"padding_idx": 0}, {"max_norm": 1.0}, {"sparse": True}])
def test_refuses_embeddings_that_vmap_does_not_follow(option):
    with pytest.raises(Unsupported, match=f"does not follow {next(iter(option))} of its Embedding"):
        check_stacked(FederatedModule(partial(Words, **option)), SampleSpec((5,), torch.int64))


def test_a_refused_module_is_left_as_it_is():
    made = FederatedModule(CountingInPython)
    with pytest.raises(Unsupported):
        check_stacked(made, SampleSpec((7,)))
    assert made.network.steps == CountingInPython().steps


class Remembering(Plain):
    """Makes a buffer in its first step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        if self.training:
            self.mean = x.mean(0)
        return super().forward(x)


def test_refuses_a_buffer_that_a_step_makes():
    with pytest.raises(Unsupported, match=r"torch\.vmap cannot map it"):
        check_stacked(FederatedModule(Remembering), SampleSpec(SHAPE))


@pytest.mark.parametrize("network", [CountingApart, CountingInPython])
def test_refuses_networks_whose_state_clients_would_share(network):
    with pytest.raises(Unsupported, match="its step changes steps, of which all clients would share one"):
        check_stacked(FederatedModule(network), SampleSpec((7,)))
