"""Tests of upload transforms in whole runs: what is noisy, what is accounted for, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from lcfl.core.callback import Callback
from lcfl.methods.aggregation import ClusterMean
from lcfl.methods.clustering import HierarchicalUpdates, OneShotHierarchical
from lcfl.methods.exchange import CentreAndEmbedding, ClusterModel, FullModel, NoExchange
from lcfl.methods.exchange.transforms import GaussianNoise, LowRankCompression, ReleaseCounts
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from lcfl.models import Layout
from tests.helpers.builders import Normed, alone, blobs, blobs_module, fedavg, fit, lcfed
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


def test_the_guarantee_is_in_the_summary(tmp_path):
    pytest.importorskip("dp_accounting")
    noise = GaussianNoise(clip=1.0, epsilon=4.0, delta=1e-3)
    fit(blobs_module(), blobs(4), ascfl(transforms=[noise]), tmp_path, rounds=2)
    summary = json.loads(next(Path(tmp_path).rglob("summary.json")).read_text())
    sigma = noise.calibrated(ReleaseCounts(2, 4, 4)).sigma
    assert summary["privacy"]["epsilon"] == pytest.approx(4.0, abs=0.01)
    assert (summary["privacy"]["sigma"], summary["privacy"]["delta"]) == (sigma, 1e-3)
    assert summary["identity"]["method"]["exchange"]["transforms"][0]["sigma"] == sigma


def test_the_accounting_uses_the_smallest_number_of_clients_of_any_round(tmp_path):
    pytest.importorskip("dp_accounting")
    noisy = ascfl(transforms=[GaussianNoise(clip=1.0, sigma=9.0)])
    data = blobs(12, newcomers=2)
    leavers = [client for client in range(12) if client not in data.newcomer_clients][:3]
    data = blobs(12, newcomers=2, leavers=dict(zip(leavers, (0, 1, 2), strict=True)))
    watch = fit(blobs_module(), data, noisy, tmp_path, rounds=2, clients_per_round=4)
    # ten clients start; one has left by round 0 and two by round 1, the last round
    few, many = (noisy.privacy_guarantee(ReleaseCounts(2, 4, number)) for number in (8, 12))
    assert watch.server.privacy_guarantee() == few and few.epsilon > many.epsilon


def test_warmup_rounds_are_releases_too():
    pytest.importorskip("dp_accounting")
    method = lcfed()
    method.exchange = CentreAndEmbedding(transforms=[GaussianNoise(clip=1.0, sigma=9.0)])
    spent = [
        each.privacy_guarantee(ReleaseCounts(2, 4, 4)).epsilon
        for each in (method, ascfl(transforms=method.exchange.transforms))
    ]
    assert spent[0] > spent[1]


@pytest.mark.parametrize(
    ("clustering", "reason"),
    [
        (OneShotHierarchical(), "uploads in the warm-up round of OneShotHierarchical have no noise"),
        (HierarchicalUpdates(), "the number of rounds that HierarchicalUpdates adds is unknown"),
    ],
)
def test_missing_privacy_guarantees_are_reported_before_the_run(clustering, reason):
    pytest.importorskip("dp_accounting")

    def method(**options):
        exchange = ClusterModel(transforms=[GaussianNoise(clip=1.0, **options)])
        return Method(LocalTraining(steps=1), exchange, ClusterMean("participants", "participants"), [clustering])

    with pytest.warns(UserWarning, match=f"GaussianNoise gives no privacy guarantee, because {reason}"):
        method(sigma=1.0).calibrated(ReleaseCounts(2, 4, 4))
    with pytest.raises(ValueError, match=f"GaussianNoise cannot guarantee an epsilon, because {reason}. Set sigma"):
        method(epsilon=1.0).calibrated(ReleaseCounts(2, 4, 4))


def test_transforms_in_the_wrong_order_or_without_effect():
    noise = GaussianNoise(clip=1.0, sigma=1.0)
    with pytest.raises(ValueError, match="LowRankCompression must be the last of the transforms"):
        ascfl(transforms=[LowRankCompression(), noise])
    with pytest.warns(UserWarning, match="transforms have no effect, because NoExchange uploads nothing"):
        Method(alone().local_update, NoExchange(transforms=[noise]), alone().aggregation)
