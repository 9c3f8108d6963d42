"""Networks, optimizers and losses that `stacked` trains as `sequential` does although they are unusual."""

from functools import partial

import pytest
import torch
from torch import nn

from lcfl.models.module import FederatedModule
from lcfl.models.pulls import Pulls
from tests.engines.networks import Inner
from tests.engines.pairs import (
    SIZES,
    assert_same_runs,
    assert_same_training,
    batches_of,
    both,
    model_of,
    near,
    stacked_pair,
)


class Aliased(nn.Module):
    """Layers with several names, and two layers that share a weight."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(7, 6)
        self.two.weight = self.one.weight
        self.both = nn.Sequential(self.one, self.norm)
        self.decision = nn.Linear(6, 4)

    def forward(self, x):
        return self.decision(torch.tanh(self.both(x) + self.norm(self.two(x))))


def test_layers_with_several_names():
    pair = stacked_pair(Aliased, (7,))
    assert_same_training(pair)
    pair[1].module.network(torch.zeros(2, 7))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_optimizers(optimizer):
    assert_same_training(stacked_pair(Inner, (7,), partial(optimizer, lr=0.05, fused=True)))


class Shaped(FederatedModule):
    """Loss and logged value have one dimension."""

    def training_step(self, batch, batch_idx=0):
        self.log("mean", batch[0].mean().reshape(1))
        return super().training_step(batch, batch_idx).reshape(1)


def test_a_loss_and_a_logged_value_of_one_entry():
    assert_same_training(stacked_pair(Inner, (7,), kind=Shaped))


class OwnPull(FederatedModule):
    """Pulls by a weight of its own; those of lcfl are 0."""

    def regularizer(self):
        if self.pulls.centre is None or self.pulls.embedding is None:
            return 0.0
        parameters = torch.cat([each.flatten() for each in self.trained_parameters()])
        return 0.3 * (parameters - self.pulls.centre).square().sum() + 0.2 * self.pulls.embedding.sum() * parameters[0]


def test_a_pull_of_the_users_own_without_those_of_lcfl():
    def pulled(client, engine):
        model = model_of(engine, client)
        pulls = Pulls(near(model), near(model, 2)[: engine.layout.num_embedding])
        return engine.run_optimizer(model, batches_of(client, SIZES[client]), pulls)

    expected, actual = both(stacked_pair(Inner, (7,), kind=OwnPull), pulled)
    assert_same_runs(expected, actual)
