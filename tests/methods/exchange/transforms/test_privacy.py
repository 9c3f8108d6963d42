"""Tests of clipping and noise by hand, of epsilon against independent formulas, and of the warnings."""

import builtins
from math import exp, inf, sqrt

import numpy as np
import pytest
import torch
from scipy.stats import norm

from lcfl.methods.exchange.transforms import GaussianNoise, ReleaseCounts
from lcfl.methods.exchange.transforms.privacy import clipped, epsilon_of, noise_multiplier_for
from lcfl.models import Layout
from tests.helpers.builders import Normed, linear

LAYOUT = Layout.from_network(linear())
ONCE = ReleaseCounts(1, 20, 20)


def draw(seed=0):
    return np.random.default_rng(seed)


def test_clipping_scales_all_vectors_together():
    vectors = {"model": torch.tensor([3.0, 0.0]), "embedding": torch.tensor([4.0])}
    assert {name: each.tolist() for name, each in clipped(vectors, 1.0).items()} == {
        "model": [pytest.approx(0.6), 0.0],
        "embedding": [pytest.approx(0.8)],
    }
    for bound in (5.0, 9.0, None):
        assert torch.equal(clipped(vectors, bound)["model"], vectors["model"].double())
    assert clipped({"model": torch.zeros(2)}, 1.0)["model"].tolist() == [0, 0]


def test_noise_is_added_to_the_clipped_update():
    update = {"update": torch.full((17,), 2.0)}
    sent = GaussianNoise(clip=1.0, sigma=0.5).encode(update, LAYOUT, draw())["update"]
    expected = 1 / sqrt(17) + 0.5 * draw().standard_normal(17)
    np.testing.assert_allclose(sent, expected, rtol=1e-6)
    exact = GaussianNoise(clip=1.0, sigma=0.0).encode(update, LAYOUT, draw())["update"]
    assert float(exact.norm()) == pytest.approx(1.0)


def test_counters_get_no_noise():
    layout, update = Layout.from_network(Normed()), torch.zeros(30)
    update[29] = 7.0
    sent = GaussianNoise(clip=1.0, sigma=0.5).encode({"model": update}, layout, draw())["model"]
    assert sent[29] == 7.0 and bool((sent[:29] != 0).all())


def exact_delta(epsilon, multiplier):
    """Returns delta of one Gaussian release with sensitivity 1 (Balle and Wang, 2018)."""
    return norm.cdf(0.5 / multiplier - epsilon * multiplier) - exp(epsilon) * norm.cdf(
        -0.5 / multiplier - epsilon * multiplier
    )


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_one_release_has_enough_noise_and_not_much_more(epsilon):
    multiplier = noise_multiplier_for(epsilon, 1e-5, ONCE)
    assert exact_delta(epsilon, multiplier) <= 1e-5 < exact_delta(epsilon, multiplier * 0.8)


def test_a_hundred_rounds_need_ten_times_the_noise():
    ratio = noise_multiplier_for(1.0, 1e-5, ReleaseCounts(100, 20, 20)) / noise_multiplier_for(1.0, 1e-5, ONCE)
    assert ratio == pytest.approx(10, rel=1e-3)  # Gaussian releases compose like one with noise / sqrt(T)


def test_sampling_and_fewer_rounds_cost_less():
    cost = [epsilon_of(2.0, 1e-5, ReleaseCounts(10, sampled, 20)) for sampled in (20, 5, 1)]
    assert cost[0] > cost[1] > cost[2] > 0
    assert epsilon_of(2.0, 1e-5, ReleaseCounts(5, 20, 20)) < cost[0]
    assert epsilon_of(2.0, 1e-5, ReleaseCounts(9, 20, 20, warmup_rounds=1)) == pytest.approx(cost[0])


def test_sigma_follows_from_epsilon():
    noise = GaussianNoise(clip=0.5, epsilon=1.0).calibrated(ReleaseCounts(3, 20, 20))
    assert noise.epsilon is None and noise.sigma == 2 * 0.5 * noise_multiplier_for(1.0, 1e-5, ReleaseCounts(3, 20, 20))
    guarantee = noise.privacy_guarantee(ReleaseCounts(3, 20, 20))
    assert 0.999 < guarantee.epsilon <= 1 and (guarantee.delta, guarantee.clip) == (1e-5, 0.5)
    assert noise.privacy_guarantee(ReleaseCounts(2, 20, 20)).epsilon < 0.9
    assert "epsilon 1, delta 1e-05 for all data of one client (clipped to 0.5" in str(guarantee)


def test_noise_without_clipping_warns_that_it_guarantees_nothing():
    with pytest.warns(UserWarning, match=r"sigma=0.1 without clip gives no privacy guarantee.*Set clip"):
        noise = GaussianNoise(sigma=0.1)
    assert noise.privacy_guarantee(ONCE) is None and noise.calibrated(ONCE) is noise
    assert GaussianNoise(clip=1.0, sigma=0.0).privacy_guarantee(ONCE) is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "sigma=None, epsilon=None; set exactly one"),
        ({"clip": 1.0, "sigma": 1.0, "epsilon": 1.0}, "sigma=1.0, epsilon=1.0; set exactly one"),
        ({"epsilon": 1.0}, "epsilon=1.0 without clip"),
        ({"clip": 0.0, "sigma": 1.0}, "clip=0.0; it must be a positive number"),
        ({"clip": 1.0, "epsilon": inf}, "epsilon=inf; it must be a positive number"),
        ({"clip": 1.0, "sigma": -1.0}, "allowed are sigma >= 0"),
        ({"clip": 1.0, "sigma": 1.0, "delta": 0.0}, "0 < delta < 1"),
    ],
)
def test_invalid_settings_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        GaussianNoise(**options)


def test_a_missing_package_is_reported_before_the_run(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "dp_accounting":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"dp-accounting, which is not installed: pip install 'lcfl\[privacy\]'"):
        GaussianNoise(clip=1.0, sigma=1.0).calibrated(ONCE)
