"""Robust aggregation rules: a round worked out again in numpy, equal models, attackers, clusters and weights."""

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from lcfl.methods.aggregation import (
    ClippedMean,
    ClusterMean,
    CoordinateMedian,
    GeometricMedian,
    GlobalMean,
    Krum,
    TrimmedMean,
    mean_model,
    rules,
)
from lcfl.models import Layout
from tests.helpers.builders import Normed, state_of, upload

LAYOUT = Layout.from_network(Normed())  # the last two of 30 entries: a float buffer and an integer
P = LAYOUT.num_parameters
RULES = [
    CoordinateMedian(), TrimmedMean(0.25), Krum(0.2), Krum(0.2, keep=3), GeometricMedian(), ClippedMean(2.0),
    ClippedMean(0.5, iterations=3),
]  # fmt: skip


def drawn(number, seed=0):
    draw = np.random.default_rng(seed)
    models = draw.normal(size=(number, LAYOUT.size)).astype(np.float32)
    models[:, LAYOUT.integer_slices()[0]] = draw.integers(0, 9, size=models[:, LAYOUT.integer_slices()[0]].shape)
    return list(torch.from_numpy(models)), draw.integers(1, 50, size=number).tolist()


def median(models, weights, start, rule):
    return np.median(models, axis=0)


def trimmed(models, weights, start, rule):
    cut = int(rule.share * len(models))
    return np.sort(models, axis=0)[cut : len(models) - cut].mean(axis=0)


def krum(models, weights, start, rule):
    attackers = int(rule.attackers * len(models))
    far = ((models[:, None, :P] - models[None, :, :P]) ** 2).sum(axis=2)
    scores = np.sort(far, axis=1)[:, 1 : 1 + max(1, len(models) - attackers - 2)].sum(axis=1)
    return models[np.argsort(scores, kind="stable")[: rule.keep]].mean(axis=0)


def geometric(models, weights, start, rule):
    share = np.array(weights) / sum(weights)
    order = np.argsort(models, axis=0, kind="stable")
    half = (np.cumsum(np.array(weights)[order], axis=0) >= sum(weights) / 2).argmax(axis=0)
    point = np.take_along_axis(np.sort(models, axis=0), half[None], axis=0)[0]
    for _ in range(rule.iterations):
        factor = share / np.maximum(np.linalg.norm((models - point)[:, :P], axis=1), rule.smoothing)
        point = factor @ models / factor.sum()
    return point


def clipped(models, weights, start, rule):
    share, point = np.array(weights) / sum(weights), start.astype(np.float64)
    for _ in range(rule.iterations):
        factor = share * np.minimum(1, rule.radius / np.linalg.norm((models - point)[:, :P], axis=1))
        point = point + factor @ (models - point)
    return point


REFERENCES = {
    CoordinateMedian: median, TrimmedMean: trimmed, Krum: krum, GeometricMedian: geometric, ClippedMean: clipped,
}  # fmt: skip


@pytest.mark.parametrize("number", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_rule_gives_what_numpy_gives(monkeypatch, rule, number):
    monkeypatch.setattr(rules, "COLUMNS", 7)
    (models, weights), (start, *_) = drawn(number), drawn(1, seed=1)[0]
    merged = rule(models, weights, start, LAYOUT)
    assert merged.dtype == torch.float32
    together = torch.stack(models)
    expected = REFERENCES[type(rule)](together.double().numpy(), weights, start.numpy(), rule)
    expected[P:] = np.sort(together[:, P:], axis=0)[(number - 1) // 2]
    np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_merged_model_of_equal_models_is_that_model(rule):
    (model,), _ = drawn(1)
    torch.testing.assert_close(rule([model] * 6, [1] * 6, model, LAYOUT), model, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_order_of_clients_does_not_matter(rule):
    models, weights = drawn(9)
    order = np.random.default_rng(3).permutation(9)
    (start,), _ = drawn(1, seed=1)
    one = rule(models, weights, start, LAYOUT)
    other = rule([models[i] for i in order], [weights[i] for i in order], start, LAYOUT)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_two_attackers_of_twelve_move_a_robust_rule_little_and_the_mean_far(rule):
    models, _ = drawn(12)
    bad = [*models[:10], torch.full((LAYOUT.size,), 1e30), torch.full((LAYOUT.size,), 1e30)]
    (start,), _ = drawn(1, seed=1)
    assert (rule(bad, [1] * 12, start, LAYOUT) - mean_model(models[:10], [1] * 10, LAYOUT))[:P].abs().max() < 4
    assert mean_model(bad, [1] * 12, LAYOUT)[:P].abs().min() > 1e28


def test_many_attackers_with_little_weight_do_not_move_the_geometric_median():
    honest, attack = torch.zeros(LAYOUT.size), torch.full((LAYOUT.size,), 1e6)
    merged = GeometricMedian()([honest, honest + 1, attack, attack, attack], [100, 100, 1, 1, 1], honest, LAYOUT)
    assert merged[:P].abs().max() < 2


def test_without_attackers_a_trimmed_mean_is_the_mean_and_a_long_radius_clips_nothing():
    models, _ = drawn(7)
    mean = mean_model(models, [1] * 7, LAYOUT)
    for rule in (TrimmedMean(0.1), ClippedMean(1e6), Krum(0.0, keep=7)):
        merged = rule(models, [1] * 7, models[0], LAYOUT)
        torch.testing.assert_close(merged[:P], mean[:P], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "number", "words"),
    [
        (TrimmedMean(0.3), 3, r"TrimmedMean\(share=0.3\) has merged a group of so few models that it leaves out"),
        (TrimmedMean(0.3), 4, None),
        (TrimmedMean(0.0), 3, None),
        (Krum(0.3, keep=3), 3, r"Krum\(attackers=0.3, keep=3\) has .* may keep the model of an attacker"),
        (Krum(0.3), 4, "may keep"),  # 4 <= 2 * 1 + 2
        (Krum(0.3), 5, None),
        (Krum(0.0), 3, None),
    ],
)
def test_a_group_that_is_too_small_for_its_rule_is_warned_about(rule, number, words):
    models, weights = drawn(number)
    with nullcontext() if words is None else pytest.warns(UserWarning, match=words), warnings.catch_warnings():
        warnings.simplefilter("error" if words is None else "always")
        rule(models, weights, models[0], LAYOUT)


def test_a_clipped_update_has_the_length_of_the_radius():
    (start, model), _ = drawn(2)
    moved = ClippedMean(0.25)([model], [1], start, LAYOUT)
    assert float(torch.linalg.vector_norm((moved - start)[:P])) == pytest.approx(0.25, rel=1e-5)


def test_clusters_merge_their_own_models_from_their_own_centres():
    models, weights = drawn(6)
    (first, second), _ = drawn(2, seed=1)
    state = state_of([None] * 6, [0, 0, 0, 1, 1, 1], [first.tolist(), second.tolist()], [True] * 6)
    uploads = [upload(i, model, weight) for i, (model, weight) in enumerate(zip(models, weights, strict=True))]
    rule = ClippedMean(0.5)
    ClusterMean("participants", "participants", "samples", rule=rule)(state, uploads, LAYOUT)
    assert torch.equal(state.centres[0], rule(models[:3], weights[:3], first, LAYOUT))
    assert torch.equal(state.centres[1], rule(models[3:], weights[3:], second, LAYOUT))


def test_the_global_model_is_merged_by_the_rule():
    models, weights = drawn(5)
    state = state_of([None] * 5, [0] * 5, [torch.zeros(LAYOUT.size).tolist()], [True] * 5)
    GlobalMean(rule=CoordinateMedian())(state, [upload(i, each) for i, each in enumerate(models)], LAYOUT)
    assert torch.equal(state.global_model, CoordinateMedian()(models, weights, models[0], LAYOUT))
    assert torch.equal(state.centres[0], state.global_model)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TrimmedMean(0.5), "TrimmedMean got share=0.5; allowed are shares from 0 to below 0.5"),
        (lambda: Krum(-0.1), "Krum got attackers=-0.1"),
        (lambda: Krum(keep=0), "Krum got keep=0"),
        (lambda: GeometricMedian(smoothing=0.0), "GeometricMedian got iterations=4 and smoothing=0.0"),
        (lambda: ClippedMean(0.0), "ClippedMean got radius=0.0 and iterations=1"),
        (lambda: ClusterMean(rule=Krum()), "got the rule Krum with over='stored'"),
    ],
)
def test_values_that_no_rule_can_have_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_the_tiniest_smoothing_of_equal_models_gives_that_model():
    models = [torch.arange(float(LAYOUT.size))] * 3
    merged = GeometricMedian(smoothing=1e-50)(models, [1, 2, 3], models[0], LAYOUT)
    torch.testing.assert_close(merged, models[0])
