"""Sums that follow the changes of models: equal to new sums when refreshed, and within their own bound in between."""

from fractions import Fraction
from math import ulp

import numpy as np
import pytest
import torch

from lcfl.core import model_sums
from lcfl.core.clients import ClientState
from lcfl.core.model_sums import AT_ONCE, BLOCK, ModelSums, add_models
from lcfl.methods.aggregation import ClusterMean, cluster_mean, mean_model
from lcfl.methods.aggregation.cluster_mean import stored_sums
from lcfl.models import Layout
from tests.helpers.bits import same
from tests.helpers.builders import Normed, linear, state_of, upload

SIZE, NUM_CLIENTS, GROUPS = 5, 12, 3
LAYOUT = Layout.from_network(linear((1, 1, 1)))  # four parameters


def mover(models):
    """Returns what carries out moves of these models."""
    return lambda sums, moves: sums.move(moves, models.__getitem__)


class Changing:
    """Models that are replaced and moved, and sums that follow these changes."""

    def __init__(self, seed, scale=1.0):
        self.draw, self.scale = np.random.default_rng(seed), scale
        self.models = {client: self.new() for client in range(NUM_CLIENTS)}
        self.move = mover(self.models)
        self.group = torch.tensor(self.draw.integers(-1, GROUPS, NUM_CLIENTS))
        self.sums = self.anew()

    def new(self):
        magnitude = self.scale ** self.draw.uniform(-1, 1)
        return torch.tensor(self.draw.normal(0, magnitude, SIZE), dtype=torch.float32)

    def anew(self):
        return ModelSums.from_models(self.group, GROUPS, SIZE, self.move)

    def round(self):
        for client in sorted(self.draw.choice(NUM_CLIENTS, 4, replace=False).tolist()):
            self.sums.take_out([client], self.move)
            self.models[client] = self.new()
        self.group = self.group.clone()
        moved = self.draw.choice(NUM_CLIENTS, 3, replace=False)
        self.group[moved] = torch.tensor(self.draw.integers(-1, GROUPS, 3))
        self.sums.regroup(self.group, self.move)

    def exact(self):
        """Returns the exact sums ``[G][P]`` as fractions, which do not round."""
        total = [[Fraction(0)] * SIZE for _ in range(GROUPS)]
        for client, group in enumerate(self.group.tolist()):
            if group >= 0:
                total[group] = [
                    a + Fraction(b) for a, b in zip(total[group], self.models[client].tolist(), strict=True)
                ]
        return total


@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("least", [1, 1000])
def test_adding_part_by_part_gives_the_same_bits_as_adding_whole_models(monkeypatch, size, least):
    monkeypatch.setattr(model_sums, "WORTH_THREADS", least)
    draw = np.random.default_rng(size)
    models = [torch.tensor(draw.normal(size=size), dtype=torch.float32) for _ in range(5)]
    factors = draw.normal(size=5).tolist()
    total, expected = (torch.from_numpy(np.random.default_rng(1).normal(size=size)) for _ in range(2))
    add_models(total, models, factors)
    for model, factor in zip(models, factors, strict=True):
        expected.add_(model, alpha=factor)
    assert torch.equal(total, expected)


def test_sums_of_more_models_than_are_held_at_once():
    many, draw = 2 * AT_ONCE + 3, np.random.default_rng(0)
    models = [torch.tensor(draw.normal(size=2), dtype=torch.float32) for _ in range(many)]
    first, then = (torch.tensor(draw.integers(-1, GROUPS, many)) for _ in range(2))
    sums = ModelSums.from_models(first, GROUPS, 2, mover(models))
    sums.regroup(then, mover(models))
    for group in range(GROUPS):
        exact = torch.stack([model.double() for model, own in zip(models, then, strict=True) if own == group]).sum(
            dim=0
        )
        torch.testing.assert_close(sums.total[group], exact, rtol=0, atol=float(sums.error[group]))


def test_new_sums_computed_by_hand():
    models = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]), torch.tensor([7.0, 7.0]), torch.tensor([0.5, -9.0])]
    sums = ModelSums.from_models(torch.tensor([0, 1, -1, 0]), 3, 2, mover(models))
    assert sums.total.tolist() == [[1.5, -7.0], [3.0, 5.0], [0.0, 0.0]] and sums.total.dtype == torch.float64
    assert sums.counts().tolist() == [2, 1, 0] and sums.largest.tolist() == [7.0, 5.0, 0.0]


def test_taking_out_one_model_and_moving_another():
    models = [torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([7.0])]
    sums = ModelSums.from_models(torch.tensor([0, 0, 1]), 2, 1, mover(models))
    sums.take_out([0], mover(models))
    sums.take_out([0], mover(models))  # it is no longer in a sum
    assert sums.total.tolist() == [[3.0], [7.0]] and sums.counts().tolist() == [1, 1]
    sums.regroup(torch.tensor([-1, 1, 1]), mover(models))
    assert sums.total.tolist() == [[0.0], [10.0]] and sums.group.tolist() == [-1, 1, 1]


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e9])
@pytest.mark.parametrize("seed", range(3))
def test_updated_sums_stay_within_their_error_bound(seed, scale):
    changing, farthest = Changing(seed, scale), [Fraction(0)] * GROUPS
    for _ in range(60):
        changing.round()
        for group, exact in enumerate(changing.exact()):
            row = changing.sums.total[group].tolist()
            apart = [abs(Fraction(a) - b) for a, b in zip(row, exact, strict=True)]
            farthest[group] = max(farthest[group], *apart)
            assert farthest[group] <= changing.sums.error[group].item()
    assert scale < 1e6 or max(farthest) > 0, "nothing was rounded, so nothing was tested"
    assert changing.sums.counts().tolist() == [int((changing.group == group).sum()) for group in range(GROUPS)]


def test_the_error_bound_is_no_larger_than_the_additions_can_round():
    changing = Changing(0)
    for _ in range(60):
        changing.round()
    additions = NUM_CLIENTS + 60 * (2 * 4 + 2 * 3)
    most = NUM_CLIENTS * 14 * max(float(model.abs().max()) for model in changing.models.values())
    assert changing.sums.error.max() <= additions * ulp(1.0) * most
    assert changing.sums.is_exact_enough


def test_a_huge_model_that_was_taken_out_leaves_a_sum_that_is_not_exact_enough():
    models = {0: torch.tensor([1e25]), 1: torch.tensor([1.0])}
    group = torch.tensor([0, 0])
    sums = ModelSums.from_models(group, 1, 1, mover(models))
    assert sums.is_exact_enough
    sums.take_out([0], mover(models))
    models[0] = torch.tensor([2.0])
    sums.regroup(group, mover(models))
    assert sums.total.tolist() != [[3.0]] and not sums.is_exact_enough
    assert sums.error >= abs(sums.total.item() - 3.0)


def test_a_huge_model_that_joins_another_group_leaves_a_sum_that_is_not_exact_enough():
    models = {0: torch.tensor([1e25]), 1: torch.tensor([1.0]), 2: torch.tensor([1.0])}
    sums = ModelSums.from_models(torch.tensor([0, 0, 1]), 2, 1, mover(models))
    assert sums.is_exact_enough
    sums.regroup(torch.tensor([1, 0, 1]), mover(models))
    assert sums.total[0].tolist() != [1.0] and not sums.is_exact_enough
    sums.regroup(torch.tensor([1, 1, 1]), mover(models))
    assert sums.is_exact_enough, "no model is left in the sum that is not exact"


# sums of a state


def stored(round=1, layout=LAYOUT):
    draw = np.random.default_rng(7)
    models = [draw.normal(size=layout.size) if client != 3 else None for client in range(6)]
    state = state_of(models, [0, 1, 1, 0, -1, 0], np.zeros((2, layout.size)))
    state.round = round
    return state


def groups(state):
    return torch.where(state.participated, torch.where(state.assignment >= 0, state.assignment, 2), -1)


def test_sums_are_recomputed_at_intervals_and_when_their_number_changes_or_they_have_drifted():
    state = stored(round=1)
    first = stored_sums(state, groups(state), 3, LAYOUT)
    assert state.clients.sums is first
    state.round = 2
    assert stored_sums(state, groups(state), 3, LAYOUT) is first
    assert stored_sums(state, groups(state), 4, LAYOUT) is not first
    first = stored_sums(state, groups(state), 3, LAYOUT)
    first.error.fill_(1.0)
    second = stored_sums(state, groups(state), 3, LAYOUT)
    assert second is not first and second.is_exact_enough
    state.round = cluster_mean.REFRESH_EVERY
    assert stored_sums(state, groups(state), 3, LAYOUT) is not second


def test_refreshed_sums_equal_those_of_a_state_without_earlier_sums():
    state, other = stored(), stored()
    for number in range(1, 5):
        state.round = number
        for client in (0, 2, 5):
            new = ClientState(torch.full((LAYOUT.size,), number / 3 + client))
            state.clients[client] = new
            other.clients[client] = new
        state.assignment = state.assignment.roll(1)
        stored_sums(state, groups(state), 3, LAYOUT)
    state.round = other.round = 2 * cluster_mean.REFRESH_EVERY
    other.assignment = state.assignment
    one, two = (stored_sums(source, groups(source), 3, LAYOUT) for source in (state, other))
    assert same(one, two)


def test_every_change_of_the_store_reaches_the_sums():
    state = stored()
    stored_sums(state, groups(state), 3, LAYOUT)
    state.clients[3] = ClientState(torch.ones(LAYOUT.size))
    state.participated[3] = True
    state.clients.update({0: ClientState(torch.ones(LAYOUT.size), received=torch.full((LAYOUT.size,), 9.0))})
    state.leave([1])
    followed = stored_sums(state, groups(state), 3, LAYOUT)
    anew = ModelSums.from_models(groups(state), 3, LAYOUT.size, state.clients.move_models)
    assert (followed.total - anew.total).abs().max() <= followed.error.max()
    assert torch.equal(followed.group, anew.group) and followed.group[1] == -1
    assert followed.total[0, 0] == pytest.approx(9 + 1 + float(state.stored_model(5)[0]))


@pytest.mark.parametrize("over", ["stored", "participants"])
def test_means_over_stored_models_equal_means_over_all_models_up_to_rounding(over):
    layout = Layout.from_network(Normed())
    state = stored(layout=layout)
    for number in range(1, 4):
        state.round = number
        state.clients[2] = ClientState(torch.full((layout.size,), float(number)))
        state.assignment = torch.tensor([0, number % 2, 1, 0, -1, 0])
        ClusterMean(over=over)(state, [upload(2, state.stored_model(2))], layout)
        known = [0, 1, 2, 4, 5]
        every = mean_model([state.stored_model(client) for client in known], [1] * 5, layout)
        torch.testing.assert_close(state.global_model, every, rtol=1e-6, atol=1e-7)
        if over == "stored":
            for cluster in range(2):
                members = state.members(cluster)
                mean = mean_model([state.stored_model(client) for client in members], [1] * len(members), layout)
                torch.testing.assert_close(state.centres[cluster], mean, rtol=1e-6, atol=1e-7)
