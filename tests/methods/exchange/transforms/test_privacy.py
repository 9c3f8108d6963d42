"""Tests of clipping and noise by hand, of epsilon against independent accountants, and of the warnings."""

from dataclasses import replace
from math import exp, inf, sqrt

import numpy as np
import pytest
import torch
from scipy.stats import beta, kstest, norm

from lcfl.methods.exchange.transforms import GaussianNoise
from lcfl.methods.exchange.transforms.privacy import clipped, epsilon_of, noise_multiplier_for, secure_normal
from lcfl.models import Layout
from tests.helpers.builders import Normed, linear

LAYOUT = Layout.from_network(linear())


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


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_an_update_that_is_not_finite_leaves_as_noise_alone(bad):
    layout, update = Layout.from_network(Normed()), torch.ones(30)
    update[3] = bad
    noise = GaussianNoise(clip=1.0, sigma=0.5)
    sent = noise.encode({"model": update}, layout, draw())["model"]
    assert torch.equal(sent, noise.encode({"model": torch.zeros(30)}, layout, draw())["model"])
    assert sent.isfinite().all() and sent[:29].all()


def test_secure_noise_is_normal_and_never_the_same():
    noise = GaussianNoise(clip=1.0, sigma=0.5, secure=True)
    one, other = (noise.encode({"update": torch.zeros(17)}, LAYOUT, draw())["update"] for _ in range(2))
    assert bool((one != other).all())
    for number in (0, 1, 5):
        assert len(secure_normal(number)) == number
    # false alarms with probability 1e-9 each; the seedless source has no other way
    numbers = secure_normal(20_001)
    assert kstest(numbers, "norm").pvalue > 1e-9
    assert abs(np.corrcoef(numbers[:10_000], numbers[10_000:20_000])[0, 1]) < 0.06


# what the uploads of a client cost


def test_epsilon_by_hand():
    """Checks delta = Phi(1/2 - epsilon) - e^epsilon Phi(-1/2 - epsilon) for one release with noise of 2 C."""
    for epsilon in (0.5, 1.0, 4.0):
        delta = norm.cdf(0.5 - epsilon) - exp(epsilon) * norm.cdf(-0.5 - epsilon)
        assert epsilon_of(1.0, delta, 1) == pytest.approx(epsilon, rel=1e-9)
        assert noise_multiplier_for(epsilon, delta, 1) == pytest.approx(1.0, rel=1e-9)
    assert epsilon_of(1e6, 1e-5, 1) == 0 == epsilon_of(1.0, 1e-5, 0)
    assert 5e19 < epsilon_of(1e-9, 1e-5, 100) < 6e19  # T / (2 sigma^2), where exponentials overflow


@pytest.mark.parametrize(("multiplier", "num_uploads"), [(0.3, 1), (1.0, 1), (4.0, 37), (30.0, 100), (0.5, 10)])
@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_epsilon_agrees_with_independent_accountants(multiplier, num_uploads, delta):
    dp = pytest.importorskip("dp_accounting")
    epsilon = epsilon_of(multiplier, delta, num_uploads)

    # the privacy loss distributions of Google's accountant, to within their discretisation
    accountant = dp.pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp.SelfComposedDpEvent(dp.GaussianDpEvent(multiplier), num_uploads))
    assert epsilon == pytest.approx(accountant.get_epsilon(delta), rel=1e-2, abs=1e-3)

    # Renyi divergences alpha T / (2 z^2), which are an upper bound and not far away
    alphas = 1 + np.geomspace(1e-3, 1e4, 2000)
    rate = num_uploads / (2 * multiplier**2)
    renyi = float((alphas * rate + np.log1p(-1 / alphas) - np.log(delta * alphas) / (alphas - 1)).min())
    assert epsilon <= renyi < 1.35 * epsilon + 0.05

    # delta by a sum over the likelihood ratios of T uploads on a grid
    distance = sqrt(num_uploads) / multiplier
    x = np.linspace(-12, 12 + distance, 400_001)
    less = np.maximum(norm.pdf(x, distance) - exp(epsilon) * norm.pdf(x), 0).sum() * (x[1] - x[0])
    assert less == pytest.approx(delta, rel=1e-3)


def test_a_hundred_uploads_need_ten_times_the_noise():
    ratio = noise_multiplier_for(1.0, 1e-5, 100) / noise_multiplier_for(1.0, 1e-5, 1)
    assert ratio == pytest.approx(10, rel=1e-9)  # Gaussian releases compose like one with noise / sqrt(T)


def test_sigma_follows_from_epsilon():
    noise = GaussianNoise(clip=0.5, epsilon=1.0).calibrated(3)
    assert noise.epsilon is None and noise.sigma == 2 * 0.5 * noise_multiplier_for(1.0, 1e-5, 3)
    guarantee = noise.privacy_guarantee(3)
    assert guarantee.epsilon == pytest.approx(1.0, rel=1e-9)
    assert (guarantee.delta, guarantee.clip, guarantee.uploads) == (1e-5, 0.5, 3)
    assert noise.privacy_guarantee(2).epsilon < 0.9
    assert "epsilon 1, delta 1e-05 for all data of one client, against everyone who sees the uploads" in str(guarantee)
    assert noise_multiplier_for(1.0, 1e-5, 0) == 0


# an attack on what is sent

DELTA = 1e-3


def sums_of_uploads(noise, update, num_uploads, trials, seed):
    """Returns the attacker's statistic ``[trials]``: the sum of the first coordinates of a client's uploads."""
    found = np.empty(trials)
    for trial in range(trials):
        uploads = (
            noise.encode({"update": update}, LAYOUT, draw((seed, trial, number)))["update"]
            for number in range(num_uploads)
        )
        found[trial] = sum(float(upload[0]) for upload in uploads)
    return found


def measured_epsilon(noise, num_uploads, trials=600):
    """Returns a lower bound on epsilon at 99.8 % confidence: an attack between the two farthest data sets of a client.

    The attacker calls every sum above 0 the first data set. Clopper and Pearson's bounds on both errors give the least
    distance of two normal distributions that so good an attack needs, and so the least epsilon.
    """
    far = torch.zeros(17)
    far[0] = 100.0  # clipped to the norm C, in either direction
    first, second = (sums_of_uploads(noise, sign * far, num_uploads, trials, seed) for seed, sign in ((1, 1), (2, -1)))
    hits, alarms = int((first > 0).sum()), int((second > 0).sum())
    least_hits = beta.ppf(0.001, hits, trials - hits + 1)
    most_alarms = beta.ppf(0.999, alarms + 1, trials - alarms)
    distance = norm.ppf(least_hits) - norm.ppf(most_alarms)
    return epsilon_of(1 / distance, DELTA, 1) if distance > 0 else 0.0


def test_an_attack_measures_less_than_the_promise_and_much_of_it():
    noise = GaussianNoise(clip=1.0, epsilon=3.0, delta=DELTA).calibrated(4)
    assert 1.5 < measured_epsilon(noise, 4) < 3.0


def half_the_sensitivity(num_uploads):
    """Returns noise for a promise of 3 that overlooks that an upload can change by 2 C."""
    noise = GaussianNoise(clip=1.0, epsilon=3.0, delta=DELTA).calibrated(num_uploads)
    return replace(noise, sigma=noise.sigma / 2), 3.0


def one_upload_counted(num_uploads):
    """Returns noise for a promise of 3 that counts one upload, as if noise were drawn only once."""
    return GaussianNoise(clip=1.0, epsilon=3.0, delta=DELTA).calibrated(1), 3.0


def amplified_by_sampling(num_uploads):
    """Returns noise with the epsilon that sampling one of 50 clients would have, if nobody saw who was sampled.

    The attacker sees it: the centre of the client's cluster changes only if one of its members was sampled.
    """
    dp = pytest.importorskip("dp_accounting")
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(50, 1, dp.GaussianDpEvent(1.5))
    accountant.compose(dp.SelfComposedDpEvent(event, num_uploads))
    return GaussianNoise(clip=1.0, sigma=3.0, delta=DELTA), accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("broken", [half_the_sensitivity, one_upload_counted, amplified_by_sampling])
def test_the_attack_finds_out_a_broken_promise(broken):
    noise, promised = broken(4)
    assert measured_epsilon(noise, 4) > 1.1 * promised


def test_noise_without_clipping_warns_that_it_guarantees_nothing():
    with pytest.warns(UserWarning, match=r"sigma=0.1 without clip gives no privacy guarantee.*Set clip"):
        noise = GaussianNoise(sigma=0.1)
    assert noise.privacy_guarantee(1) is None and noise.calibrated(1) is noise
    assert GaussianNoise(clip=1.0, sigma=0.0).privacy_guarantee(1) is None
    assert GaussianNoise(clip=1.0, sigma=1.0, before="aggregation").privacy_guarantee(1) is None


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
        ({"clip": 1.0, "sigma": 1.0, "before": "noon"}, "before='noon'; allowed are upload and aggregation"),
    ],
)
def test_invalid_settings_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        GaussianNoise(**options)
