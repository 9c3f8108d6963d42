"""Tests of upload transforms in whole runs: what is noisy, what is accounted for, and what is refused."""

import itertools
import json
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lcfl.core import rng
from lcfl.core.callback import Callback
from lcfl.federation.federation import Federation
from lcfl.methods.aggregation import ClusterMean
from lcfl.methods.clustering import HierarchicalUpdates, OneShotHierarchical
from lcfl.methods.exchange import CentreAndEmbedding, ClusterModel, FullModel, NoExchange
from lcfl.methods.exchange.transforms import GaussianNoise, LowRankCompression
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from lcfl.models import Layout
from tests.helpers.builders import (
    Normed,
    alone,
    blobs,
    blobs_module,
    dealt,
    fedavg,
    fit,
    lcfed,
    linear_module,
    two_sided,
)
from tests.helpers.clustered import fl_hc
from tests.methods.test_ascfl import ascfl

pytestmark = pytest.mark.filterwarnings("ignore:GreedyIncentive")


@pytest.mark.parametrize(("method", "name"), [(fedavg, FullModel), (lcfed, CentreAndEmbedding)])
def test_a_transform_that_loses_nothing_changes_nothing(tmp_path, method, name):
    plain, changed = method(), method()
    changed.exchange = name(transforms=[GaussianNoise(clip=1e9, sigma=0.0)])
    one, other = (fit(blobs_module(), blobs(12), each, tmp_path, rounds=3).state for each in (plain, changed))
    torch.testing.assert_close(one.global_model, other.global_model)
    torch.testing.assert_close(one.centres, other.centres)


def test_the_server_knows_noisy_models_and_clients_keep_exact_ones(tmp_path):
    method = lcfed()
    method.exchange = CentreAndEmbedding(transforms=[GaussianNoise(clip=1.0, sigma=0.01)])
    state = fit(blobs_module(), blobs(12), method, tmp_path, rounds=2).state
    for client in range(12):
        own, known = state.clients[client].model, state.stored_model(client)
        assert float((own - known).abs().max()) > 0
        assert torch.equal(method.exchange.personal(state, client, Layout.from_network(Normed())), own)
    means = torch.stack([state.stored_model(client) for client in range(12)]).mean(dim=0)
    torch.testing.assert_close(state.global_model, means)


def test_noise_is_drawn_anew_for_every_round_and_client(tmp_path):
    noisy = ascfl(transforms=[GaussianNoise(clip=1.0, sigma=0.1)], local=LocalTraining(epochs=1))
    uploads = {}

    class Keep(Callback):
        def on_uploads(self, state, uploads):
            kept.update({(state.round, each.client): each.payload["update"] for each in uploads})

    kept = uploads
    fit(blobs_module(lr=1e-12), blobs(3), noisy, tmp_path, rounds=2, callbacks=[Keep()])
    vectors = torch.stack(list(kept.values()))
    assert torch.pdist(vectors).min() > 0.1 and float(vectors.std()) == pytest.approx(0.1, rel=0.05)


def test_extra_rounds_have_noise_of_their_own(tmp_path):
    method, uploads = fl_hc(1, num_clusters=2), []
    method.exchange = ClusterModel(transforms=[GaussianNoise(clip=1.0, sigma=0.1)])

    class Keep(Callback):
        def on_extra_round_end(self, state, uploads):
            self.keep(state, uploads)

        def on_uploads(self, state, uploads):
            self.keep(state, uploads)

        def keep(self, state, new):
            uploads.extend(each.payload["model"] - each.answers.payload["model"] for each in new)

    with pytest.warns(UserWarning, match="no privacy guarantee"):
        fit(blobs_module(lr=1e-12), blobs(3), method, tmp_path, rounds=2, callbacks=[Keep()])
    assert len(uploads) == 9 and torch.pdist(torch.stack(uploads)).min() > 0.1


def test_a_client_that_diverges_sends_clipped_noise_like_everyone(tmp_path):
    inputs, targets, train, test = two_sided(3)
    inputs[train[1]] = np.nan
    method = lcfed(2, dimension=2)
    method.exchange = CentreAndEmbedding(transforms=[GaussianNoise(clip=1.0, sigma=0.1)])
    uploads = {}

    class Keep(Callback):
        def on_uploads(self, state, uploads):
            kept.update({(state.round, each.client): each for each in uploads})

    kept = uploads
    with pytest.warns(UserWarning, match=r"client 1, round .* clipped and noisy as always"):
        watch = fit(
            linear_module(), dealt(inputs, targets, train, test=test), method, tmp_path, rounds=2, callbacks=[Keep()]
        )
    assert sorted(uploads) == [(number, client) for number in (0, 1) for client in range(3)]
    update = uploads[1, 1].payload["model"] - uploads[1, 1].answers.payload["centre"]
    assert 0.05 < float(update.std()) < 0.2, "noise alone"
    assert torch.equal(watch.state.clients[1].model, watch.state.initial), "the client keeps its previous model"
    assert watch.state.centres.isfinite().all()
    assert [row["train/failed_clients"] for row in watch.rows] == [1, 1]
    assert all(np.isfinite(row["train/loss"]) for row in watch.rows)


def test_noise_before_the_aggregation_is_not_seen_by_the_clustering(tmp_path):
    """Checks the order of AS-CFL Algorithm 1: clusters from exact updates (lines 15 to 24), then noise (line 31)."""
    seen = {}

    def run(folder, *transforms):
        class Keep(Callback):
            def on_round_end(self, uploads):
                seen[folder] = [each.payload["update"] for each in uploads]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            method = ascfl(transforms=list(transforms))
        watch = fit(blobs_module(), blobs(6), method, tmp_path / folder, callbacks=[Keep()])
        return watch.state

    exact = run("exact", GaussianNoise(clip=1.0, sigma=0.0))
    with pytest.warns(UserWarning, match="because the server and its clustering read the uploads before the noise"):
        late = run("late", *(GaussianNoise(clip, sigma, before="aggregation") for clip, sigma in ((1, 0.1), (2, 0.2))))
    assert all(torch.equal(*pair) for pair in zip(seen["exact"], seen["late"], strict=True))
    assert torch.equal(exact.assignment, late.assignment)
    draws = []  # the two noises of a client, of which neither is the one before an upload
    for client in range(6):
        draw = rng.generator(0, "aggregation", 0, client)
        draws.append(sum(sigma * draw.standard_normal(len(late.initial)) for sigma in (0.1, 0.2)))
    sizes = torch.tensor([36.0] * 6, dtype=torch.float64)
    for cluster in range(late.num_clusters):
        members = [client for client in range(6) if late.assignment[client] == cluster]
        mean = sum(draws[client] * float(sizes[client]) for client in members) / float(sizes[members].sum())
        torch.testing.assert_close(late.centres[cluster] - exact.centres[cluster], torch.from_numpy(mean).float())


def test_noise_before_the_aggregation_is_refused_where_stored_models_are_merged():
    with pytest.raises(ValueError, match=r"before: aggregation.*ClusterMean merges stored models.*before: upload"):
        method = lcfed()
        replace(method, exchange=CentreAndEmbedding(transforms=[GaussianNoise(1.0, 1.0, before="aggregation")]))
    with pytest.raises(ValueError, match="cannot guarantee an epsilon, because the server and its clustering read"):
        ascfl(transforms=[GaussianNoise(1.0, epsilon=1.0, before="aggregation")]).calibrated(2, 4)


def test_a_run_with_secure_noise_cannot_be_resumed(tmp_path):
    options = {"clients_per_round": 1.0, "evaluate_every": 0, "accelerator": "cpu", "devices": 1, "logger": False}
    options |= {"enable_progress_bar": False, "default_root_dir": tmp_path, "name": "run"}
    method = ascfl(transforms=[GaussianNoise(clip=1.0, sigma=0.1, secure=True)])
    states = [Federation(rounds=1, **options).fit(blobs_module(), blobs(4), method).state for _ in range(2)]
    assert bool((states[0].global_model != states[1].global_model).all())
    with pytest.raises(ValueError, match=r"secure: true cannot be resumed.*Start a new run"):
        Federation(rounds=2, **options).fit(blobs_module(), blobs(4), method, ckpt_path="last")


# what is accounted for


def test_the_guarantee_is_in_the_summary(tmp_path):
    noise = GaussianNoise(clip=1.0, epsilon=4.0, delta=1e-3)
    fit(blobs_module(), blobs(4), ascfl(transforms=[noise]), tmp_path, rounds=2)
    summary = json.loads(next(Path(tmp_path).rglob("summary.json")).read_text())
    sigma = noise.calibrated(2).sigma
    assert summary["privacy"]["epsilon"] == pytest.approx(4.0)
    assert summary["privacy"] | {"epsilon": 4.0} == {
        "class": "PrivacyGuarantee", "epsilon": 4.0, "delta": 1e-3, "sigma": sigma, "clip": 1.0, "uploads": 2
    }  # fmt: skip
    assert summary["identity"]["method"]["exchange"]["transforms"][0]["sigma"] == sigma


def test_the_client_that_uploads_most_often_counts(tmp_path):
    noisy = ascfl(transforms=[GaussianNoise(clip=1.0, sigma=9.0)])
    data = blobs(12, newcomers=2)
    leavers = [client for client in range(12) if client not in data.newcomer_clients][:3]
    data = blobs(12, newcomers=2, leavers=dict(zip(leavers, (0, 1, 2), strict=True)))
    watch = fit(blobs_module(), data, noisy, tmp_path, rounds=6, clients_per_round=4)
    times = Counter(client for sampled in watch.sampled.values() for client in sampled)
    most = max(times.values())
    assert len(watch.sampled) == 6 and most < 6 and min(times.values()) < most
    assert watch.server.privacy_guarantee() == noisy.privacy_guarantee(most, 12)
    assert watch.server.privacy_guarantee().uploads == most


def test_a_run_without_a_member_of_a_cluster_shows_it(tmp_path):
    """Shows why no amplification by sampling is claimed: the centre of a cluster that nobody was sampled from stays."""
    method = fl_hc(0, num_clusters=4)
    method.exchange = ClusterModel(transforms=[GaussianNoise(clip=1.0, sigma=0.001)])
    with pytest.warns(UserWarning, match="no privacy guarantee"):
        watch = fit(blobs_module(), blobs(12), method, tmp_path, rounds=4, clients_per_round=2)
    for before, after in itertools.pairwise(watch.history):
        touched = {int(after.assignment[client]) for client in watch.sampled[after.round]}
        stayed = [torch.equal(*pair) for pair in zip(before.centres, after.centres, strict=True)]
        assert stayed == [cluster not in touched for cluster in range(4)]


def test_warmup_rounds_are_uploads_too():
    method = lcfed()
    method.exchange = CentreAndEmbedding(transforms=[GaussianNoise(clip=1.0, sigma=9.0)])
    plain = ascfl(transforms=method.exchange.transforms)
    assert [each.privacy_guarantee(2, 4).uploads for each in (method, plain)] == [3, 2]


@pytest.mark.parametrize(
    ("clustering", "reason"),
    [
        (OneShotHierarchical(), "uploads in the warm-up round of OneShotHierarchical have no noise"),
        (HierarchicalUpdates(), "the number of rounds that HierarchicalUpdates adds is unknown"),
    ],
)
def test_missing_privacy_guarantees_are_reported_before_the_run(clustering, reason):
    def method(**options):
        exchange = ClusterModel(transforms=[GaussianNoise(clip=1.0, **options)])
        return Method(LocalTraining(steps=1), exchange, ClusterMean("participants", "participants"), [clustering])

    with pytest.warns(UserWarning, match=f"GaussianNoise gives no privacy guarantee, because {reason}"):
        method(sigma=1.0).calibrated(2, 4)
    with pytest.raises(ValueError, match=f"GaussianNoise cannot guarantee an epsilon, because {reason}. Set sigma"):
        method(epsilon=1.0).calibrated(2, 4)


def test_transforms_in_the_wrong_order_or_without_effect():
    noise = GaussianNoise(clip=1.0, sigma=1.0)
    with pytest.raises(ValueError, match="LowRankCompression must be the last of the transforms"):
        ascfl(transforms=[LowRankCompression(), noise])
    with pytest.warns(UserWarning, match="transforms have no effect, because NoExchange uploads nothing"):
        Method(alone().local_update, NoExchange(transforms=[noise]), alone().aggregation)
