"""Tests of AS-CFL as a whole: rounds in numpy, special cases, bytes, first round and groups."""

import functools

import numpy as np
import pytest
import torch

import lcfl.federation.session
from lcfl.core.callback import Callback
from lcfl.core.messages import Downlink, Uplink
from lcfl.methods.aggregation import ClusterMean, GlobalMean, UpdateMean
from lcfl.methods.aggregation.update_mean import updated_model
from lcfl.methods.clustering import GreedyIncentive, SplitAndMerge, UpdateEM
from lcfl.methods.clustering.initialisation import balanced_labels
from lcfl.methods.exchange import ClusterModel, ClusterUpdate, FullModel
from lcfl.methods.exchange.transforms import LowRankCompression
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from lcfl.models import Layout
from tests.helpers.builders import Normed, alone, blobs, blobs_module, dealt, fedavg, fit, linear_module, two_sided
from tests.methods.in_numpy import Clients
from tests.server.test_dropouts import assert_not_reporting_is_like_failing, dropping, faulty, spoil

SIZE = 16 * 16 + 16 + 16 * 8 + 8  # of blobs_module's network

pytestmark = pytest.mark.filterwarnings("ignore:GreedyIncentive")


def ascfl(*clustering, local=None, transforms=(), **options):
    if not clustering:
        clustering = (GreedyIncentive(**options), UpdateEM(), SplitAndMerge())
    local = local or LocalTraining(epochs=1, lr_decay=0.9, fill_batch=True)
    return Method(local, ClusterUpdate(transforms=transforms), UpdateMean(), list(clustering))


# rounds, derived independently


def test_two_rounds_in_numpy(tmp_path):
    """Checks stages 1 and 3 against the paper's equations, with four clients of two kinds and without a proxy set."""
    clients = Clients(6, 4, 3, 6)
    lr, decay = 0.5, 0.5
    module = linear_module(lr)
    method = ascfl(
        GreedyIncentive(candidates=0.3, explained_variance=None), local=LocalTraining(epochs=2, lr_decay=decay)
    )
    watch = fit(module, clients.data(), method, tmp_path, rounds=2)
    start = np.stack([module.initial_model(0).double().numpy()] * 4)
    n = clients.sizes
    for number, each in enumerate(watch.history):
        trained = start.copy()
        for client in range(4):
            # a batch holds all samples, so an epoch is one step
            trained[client] = clients.trained(trained[client], client, 2, lr * decay**number)
        delta = trained - start
        unit = delta[:, 9:] / np.linalg.norm(delta[:, 9:], axis=1, keepdims=True)
        similarity = unit @ unit.T
        left, groups = [0, 1, 2, 3], []
        while left:
            score = [sum(n[j] * similarity[i, j] for j in left) for i in left]
            seed = left[int(np.argmax(score))]
            left.remove(seed)
            ranked = sorted(left, key=lambda i: -similarity[seed, i])[: max(1, int(np.ceil(0.3 * len(left))))]
            groups.append([seed, *ranked])
            left = [i for i in left if i not in ranked]
        for group in groups:
            share = n[group] / n[group].sum()
            merged = share @ start[group] + share @ delta[group]
            for client in group:
                np.testing.assert_allclose(each.centres[each.assignment[client]], merged, atol=2e-6)
        found = {tuple(torch.nonzero(each.assignment == k).flatten().tolist()) for k in each.assignment.unique()}
        assert found == {tuple(sorted(group)) for group in groups}
        start = np.stack([each.centres[each.assignment[client]].double().numpy() for client in range(4)])
    assert len(groups) == 2


# formulas


def test_update_mean_by_hand():
    layout = Layout.from_network(Normed())
    counters = layout.integer_slices()[0].start
    starts, changes = [torch.zeros(30), torch.ones(30)], [torch.full((30,), 2.0), torch.full((30,), 3.0)]
    uploads = [
        Uplink(client, {"update": change}, samples, Downlink({"model": start}))
        for client, (start, change, samples) in enumerate(zip(starts, changes, (3, 1), strict=True))
    ]
    mean = updated_model(uploads, layout)
    assert mean[:counters].tolist() == [(3 * (0 + 2) + 1 * (1 + 3)) / 4] * counters
    assert mean[counters].item() == 4.0  # counters take the maximum


def test_an_update_is_what_training_changed():
    layout = Layout.from_network(Normed())
    sent = Downlink({"model": torch.ones(30)})
    from lcfl.methods.local import LocalOutput

    assert ClusterUpdate().up(LocalOutput(torch.arange(30.0), 0, 0.0), sent, layout)["update"].tolist() == list(
        range(-1, 29)
    )


# special cases that equal other methods


def test_without_clustering_ascfl_is_fedavg_up_to_rounding(tmp_path):
    local = LocalTraining(steps=3)
    plain = fit(blobs_module(), blobs(12), fedavg(), tmp_path, rounds=4, clients_per_round=5)
    method = Method(local, ClusterUpdate(), UpdateMean())
    ours = fit(blobs_module(), blobs(12), method, tmp_path, rounds=4, clients_per_round=5)
    torch.testing.assert_close(ours.state.global_model, plain.state.global_model)
    torch.testing.assert_close(ours.state.centres[0], plain.state.global_model)


def test_if_all_clients_are_admitted_ascfl_is_fedavg(tmp_path):
    method = ascfl(GreedyIncentive(theta=1e-9, margin=0.99), local=LocalTraining(steps=3))
    ours = fit(blobs_module(), blobs(12, proxy=50), method, tmp_path, rounds=3)
    plain = fit(blobs_module(), blobs(12), fedavg(), tmp_path, rounds=3)
    assert [row["cluster/count"] for row in ours.rows] == [1, 1, 1]
    assert [row["cluster/admitted"] for row in ours.rows] == [11, 11, 11]
    torch.testing.assert_close(ours.state.global_model, plain.state.global_model)


def test_if_no_client_is_admitted_every_client_trains_alone(tmp_path):
    """Checks that K = N under the rule as printed, which no candidate ever passes."""
    method = ascfl(GreedyIncentive(rule="strict", theta=1.0), local=LocalTraining(steps=3))
    ours = fit(blobs_module(), blobs(12, proxy=50), method, tmp_path, rounds=3)
    assert [row["cluster/count"] for row in ours.rows] == [12, 12, 12]
    own = fit(blobs_module(), blobs(12), alone(steps=3), tmp_path, rounds=3).state
    for client in range(12):
        torch.testing.assert_close(ours.state.centre_of(client), own.clients[client].model)


class Fixed(GreedyIncentive):
    """Sets given clusters before the first round and keeps them."""

    groups = ()

    def on_fit_start(self, server, state):
        state.assignment = torch.tensor(self.groups)
        state.centres = state.initial.repeat(len(set(self.groups)), 1)

    def on_round_end(self, server, state, uploads):
        pass


def test_with_fixed_members_ascfl_is_fedavg_inside_every_cluster(tmp_path):
    """Checks reading A12: base_k is w_k if no client changes its cluster."""
    Fixed.groups = [0, 1] * 6
    local = LocalTraining(steps=3)
    mean = ClusterMean("participants", "participants", "samples")
    states = [
        fit(blobs_module(), blobs(12), Method(local, exchange, merge, [fixed]), tmp_path, rounds=4).state
        for exchange, merge, fixed in (
            (ClusterUpdate(), UpdateMean(), Fixed()),
            (ClusterModel(), mean, type("AsModels", (Fixed,), {"reads": ("model",)})()),
        )
    ]
    torch.testing.assert_close(states[0].centres, states[1].centres)
    assert not torch.equal(states[0].centres[0], states[0].centres[1])


def test_the_order_of_clients_does_not_matter(tmp_path):
    """Permutes the clients and their data and checks that the clusters are permuted alike.

    Batches are full, so that the clients' random streams do not matter.
    """
    inputs, targets, train, test = two_sided(6, size=6)
    order = [3, 5, 0, 4, 2, 1]
    runs = [
        fit(
            linear_module(0.5),
            dealt(inputs, targets, [train[i] for i in each], test=[test[i] for i in each]),
            ascfl(GreedyIncentive(candidates=0.3), UpdateEM(), local=LocalTraining(epochs=2)),
            tmp_path,
            rounds=2,
        ).state
        for each in (range(6), order)
    ]
    for place, client in enumerate(order):
        torch.testing.assert_close(runs[1].centre_of(place), runs[0].centre_of(client), atol=2e-6, rtol=1e-4)


# bytes, first round, groups


def test_compressed_uploads_are_counted_with_their_compressed_size(tmp_path):
    plain = fit(blobs_module(), blobs(12), ascfl(), tmp_path)
    whole = fit(blobs_module(), blobs(12), ascfl(transforms=[LowRankCompression(0.9)]), tmp_path)
    assert whole.rows[0]["comm/down_bytes"] == plain.rows[0]["comm/down_bytes"]
    saved = plain.rows[0]["comm/up_bytes"] - whole.rows[0]["comm/up_bytes"]
    assert saved > 0 and saved % 4 == 0
    apart = (whole.state.global_model - plain.state.global_model).norm()
    assert 0 < apart / plain.state.global_model.norm() < 0.2


def test_the_first_round_starts_with_one_cluster_and_forms_more(tmp_path):
    watch = fit(blobs_module(), blobs(12), ascfl(incentive=False), tmp_path)
    assert watch.rows[0]["comm/down_bytes"] == 4 * 12 * SIZE  # every client got w^0
    assert watch.rows[0]["cluster/count"] > 1 and "cluster/stability" not in watch.rows[0]
    counts = torch.bincount(watch.state.assignment)
    assert bool((counts > 0).all()) and len(counts) == watch.state.num_clusters


def test_stability_is_logged_every_round_and_its_mean_at_the_end(tmp_path):
    watch = fit(blobs_module(), blobs(12), ascfl(incentive=False), tmp_path, rounds=4)
    stable = [row["cluster/stability"] for row in watch.rows[1:]]
    assert len(stable) == 3 and all(0 <= each <= 1 for each in stable)
    assert watch.metrics["cluster/stability"] == pytest.approx(np.mean(stable))


class Start(UpdateEM):
    """Draws `num_clusters` random clusters before the first round."""

    num_clusters = 4

    def on_fit_start(self, server, state):
        state.assignment = balanced_labels(state.num_clients, self.num_clusters, server.seed)
        state.centres = state.initial.repeat(self.num_clusters, 1)


@pytest.mark.parametrize("num_clusters", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 12])
def test_stages_two_and_three_find_the_groups(tmp_path, num_clusters):
    """Checks that the silhouette finds the four groups from any number of clusters.

    The EM alone may end with fewer than four groups, even from the right number.
    """
    Start.num_clusters = num_clusters
    method = ascfl(Start(), SplitAndMerge("silhouette"), local=LocalTraining(epochs=2))
    watch = fit(blobs_module(0.1), blobs(24), method, tmp_path, rounds=12)
    assert [(row["cluster/count"], row["cluster/ari"]) for row in watch.rows[-3:]] == [(4.0, 1.0)] * 3


def test_one_client_and_one_cluster(tmp_path):
    watch = fit(blobs_module(), blobs(1, proxy=20), ascfl(), tmp_path, rounds=2)
    assert watch.state.num_clusters == 1 and watch.metrics["test/own_split/cluster/acc"] >= 0


def test_a_proxy_set_without_a_class_works(tmp_path):
    with pytest.warns(UserWarning, match="data.proxy: the 3 samples"):
        watch = fit(blobs_module(), blobs(8, proxy=3), ascfl(), tmp_path, rounds=2)
    assert watch.rows[1]["cluster/tested_models"] >= 8


class Tested(Callback):
    """Records `proxy_score` of the global model and the value that it should have."""

    def on_fit_end(self, server, state):
        self.found = server.proxy_score([state.global_model, state.initial])
        network = server.layout.unpack(state.global_model, server.module.make_network()).eval()
        inputs, labels = server.data.samples.batch(server.data.population.proxy, torch.device("cpu"))
        with torch.no_grad():
            self.expected = float((network(inputs).argmax(dim=1) == labels).float().mean())


def test_the_proxy_set_is_not_transformed(tmp_path):
    from lcfl.data.transforms import LabelPermutation

    tested = Tested()
    fit(
        blobs_module(),
        blobs(8, proxy=40, client_transforms=[LabelPermutation()]),
        ascfl(),
        tmp_path,
        rounds=2,
        callbacks=[tested],
    )
    assert tested.found[0] == pytest.approx(tested.expected) and len(tested.found) == 2


def test_an_accuracy_without_a_proxy_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="got 0, so there is no proxy set"):
        fit(blobs_module(), blobs(8), ascfl(), tmp_path, callbacks=[Tested()])


# clients that do not report


def test_a_client_with_a_broken_upload_counts_as_dropped_out(tmp_path, monkeypatch):
    def run():
        return fit(blobs_module(), blobs(12), ascfl(incentive=False), tmp_path, rounds=3).state

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"round 1: .* \(4\)"):
        patch.setattr(lcfl.federation.session, "Worker", faulty(4, 1, spoil("upload", float("nan"))))
        broken = run()
    monkeypatch.setattr(lcfl.federation.session, "Server", dropping(4, 1))
    dropped = run()
    assert torch.equal(broken.centres, dropped.centres) and torch.equal(broken.assignment, dropped.assignment)


def test_a_client_that_does_not_report_counts_like_one_that_failed(tmp_path, monkeypatch):
    run = functools.partial(fit, blobs_module(), blobs(12), ascfl(incentive=False), tmp_path, rounds=3)
    assert_not_reporting_is_like_failing(run, monkeypatch)


def test_all_clients_of_a_round_may_be_missing(tmp_path):
    watch = fit(blobs_module(), blobs(4), ascfl(), tmp_path, rounds=8, client_dropout=0.8)
    lost = [row["train/dropped_clients"] for row in watch.rows]
    assert 4 in lost
    number = lost.index(4)
    before = watch.history[number - 1].centres if number else watch.state.initial.unsqueeze(0)
    assert torch.equal(watch.history[number].centres, before)


def test_updates_and_models_are_not_interchangeable():
    with pytest.raises(ValueError, match="UpdateMean reads update from the uploads, but FullModel uploads model"):
        Method(LocalTraining(steps=1), FullModel(), UpdateMean())
    with pytest.raises(ValueError, match="GlobalMean reads model from the uploads, but ClusterUpdate uploads update"):
        Method(LocalTraining(steps=1), ClusterUpdate(), GlobalMean())
