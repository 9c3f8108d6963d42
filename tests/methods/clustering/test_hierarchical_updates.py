"""Tests of FL+HC: the extra round of all clients, a run in numpy, and exact properties."""

from itertools import combinations

import numpy as np
import pytest
import torch

from lcfl.methods.clustering import HierarchicalUpdates
from lcfl.methods.exchange import ClusterModel
from lcfl.methods.exchange.transforms import GaussianNoise, UploadTransform
from lcfl.methods.local import LocalTraining
from lcfl.models import Layout
from tests.helpers.bits import same
from tests.helpers.builders import Normed, blobs, blobs_module, fit, linear_module, server_of, state_of, upload
from tests.helpers.clustered import fl_hc
from tests.methods.clustering.models import LAYOUT, axis
from tests.methods.in_numpy import Clients

CLIENTS = Clients(6, 5, 4, 3, 2)
LR = 0.5


def farthest(one, other):
    """Returns the complete linkage of l1 distances."""
    return max(np.abs(a - b).sum() for a in one for b in other)


def ward(one, other):
    """Returns the root of twice the growth of the sum of squared distances to the means."""
    share = len(one) * len(other) / (len(one) + len(other))
    return np.sqrt(2 * share * ((one.mean(axis=0) - other.mean(axis=0)) ** 2).sum())


def joined(points, apart, number):
    """Joins the two closest groups until `number` groups are left.

    Returns the groups, and the middle between the heights of the last merge and the next one.
    """
    groups, heights = [{i} for i in range(len(points))], []
    while True:
        pairs = {apart(*(points[sorted(each)] for each in pair)): pair for pair in combinations(groups, 2)}
        heights.append(min(pairs))
        if len(groups) == number:
            return [sorted(group) for group in groups], np.mean(heights[-2:])
        one, other = pairs[heights[-1]]
        groups = [group for group in groups if group not in (one, other)] + [one | other]


@pytest.mark.parametrize(
    ("options", "apart", "expected"),
    [
        ({"metric": "l1", "linkage": "complete", "num_clusters": 2}, farthest, [[0, 2, 4], [1, 3]]),
        ({"metric": "l2", "linkage": "ward", "num_clusters": 3}, ward, [[0, 2, 4], [1], [3]]),
    ],
)
def test_pre_training_clustering_and_the_next_round_match_numpy(tmp_path, options, apart, expected):
    method = fl_hc(1, LocalTraining(steps=2), **options)
    watch = fit(linear_module(LR), CLIENTS.data(), method, tmp_path, rounds=2)
    w0 = linear_module().initial_model(0).double().numpy()
    w1 = CLIENTS.mean([CLIENTS.trained(w0, i, 2) for i in range(5)], range(5))
    np.testing.assert_allclose(watch.history[0].centres, w1[None], atol=2e-6)
    # The clustering round and training round 1 have the same local runs here, both with full batches from w1.
    w = [CLIENTS.trained(w1, i, 2) for i in range(5)]
    groups, threshold = joined(np.stack(w) - w1, apart, options["num_clusters"])
    for group in groups:
        (number,) = set(watch.state.assignment[group].tolist())
        np.testing.assert_allclose(watch.state.centres[number], CLIENTS.mean(w, group), atol=3e-6)
    assert sorted(groups) == expected
    assert watch.rows[1]["cluster/threshold"] == pytest.approx(threshold, rel=1e-4)


def test_bytes_of_the_extra_round_are_counted_once(tmp_path):
    watch = fit(blobs_module(), blobs(12), fl_hc(2, num_clusters=3), tmp_path, rounds=4, clients_per_round=5)
    size = watch.state.initial.numel()
    for number, row in enumerate(watch.rows):
        assert row["comm/down_bytes"] == row["comm/up_bytes"] == 4 * size * (5 + 12 * (number == 2))
        assert ("cluster/threshold" in row) is (number == 2)
    assert [each.row["cluster/count"] for each in watch.history] == [1, 1, 3, 3]
    assert [each.round for each in watch.history] == [0, 1, 2, 3]


def test_every_client_has_a_cluster_even_if_it_was_never_sampled(tmp_path):
    watch = fit(blobs_module(), blobs(12), fl_hc(1, num_clusters=4), tmp_path, rounds=2, clients_per_round=2)
    assert (watch.state.assignment >= 0).all() and not watch.state.participated.all()
    sampled = {int(watch.state.assignment[i]) for i in watch.sampled[1]}
    common = watch.history[0].centres[0]
    for cluster in range(4):  # clusters without a sampled client are still at the common model
        assert same(watch.state.centres[cluster], common) is (cluster not in sampled)


def clustered(clustering, updates, common):
    state = state_of([None] * 4, [0] * 4, [common.tolist()])
    uploads = [upload(i, common + update) for i, update in updates.items()]
    clustering.on_extra_round_end(server_of(LAYOUT), state, uploads)
    return state


def test_all_clients_train_from_the_current_common_model(tmp_path):
    sent = {}

    class Watched(HierarchicalUpdates):
        def on_extra_round_end(self, server, state, uploads):
            sent.update({upload.client: upload.answers.payload["model"] for upload in uploads})
            super().on_extra_round_end(server, state, uploads)

    method = fl_hc()
    method.clustering = [Watched(2, num_clusters=2)]
    watch = fit(blobs_module(), blobs(12), method, tmp_path, rounds=3, clients_per_round=5)
    common = watch.history[1].centres[0]
    assert sorted(sent) == list(range(12)) and all(same(each, common) for each in sent.values())
    assert not same(common, watch.state.initial)


def test_buffers_do_not_count():
    layout, clustering = Layout.from_network(Normed()), HierarchicalUpdates(0, num_clusters=2)
    state = state_of([None] * 4, [0] * 4, [[0.0] * layout.size])
    models = torch.zeros(4, layout.size)
    models[2:, 0], models[::2, layout.num_parameters :] = 1.0, 90.0
    clustering.on_extra_round_end(server_of(layout), state, [upload(i, each) for i, each in enumerate(models)])
    assert state.assignment.tolist() == [0, 0, 1, 1]


def test_updates_are_compared_not_models_and_unlike_clients_stay_apart():
    """The large common model gives all models nearly the same direction. The updates have two opposite directions."""
    common = axis(3, 100.0)
    updates = {0: axis(0), 1: axis(0, -1.0), 2: axis(0, 2.0), 3: axis(0, -2.0)}
    state = clustered(HierarchicalUpdates(0, "cosine", "average", num_clusters=2), updates, common)
    assert state.assignment.tolist() == [0, 1, 0, 1]
    assert torch.equal(state.centres, common.repeat(2, 1))
    state = clustered(HierarchicalUpdates(0, "cosine", "average", 0.5, None), updates, common)
    assert state.assignment.tolist() == [0, 1, 0, 1]


def test_the_linkage_and_the_metric_decide():
    """The line has clients at 0, 20, 42 and 65. The third is 22 from the first two, or 42 by complete linkage.

    In the plane, (3, 3) and (-5, 0) are at the distances 4.2 and 5 from 0 by l2, and 6 and 5 by l1.
    """
    line = {i: axis(0, x) for i, x in enumerate([0.0, 20.0, 42.0, 65.0])}
    for linkage, expected in (("single", [0, 0, 0, 1]), ("complete", [0, 0, 1, 1])):
        clustering = HierarchicalUpdates(0, linkage=linkage, num_clusters=2)
        assert clustered(clustering, line, axis(1)).assignment.tolist() == expected
    plane = {0: axis(0, 0.0), 1: axis(0, 3.0) + axis(1, 3.0), 2: axis(0, -5.0), 3: axis(2, 90.0)}
    for metric, expected in (("l2", [0, 0, 1, 2]), ("l1", [0, 1, 0, 2])):
        clustering = HierarchicalUpdates(0, metric, "average", num_clusters=3)
        assert clustered(clustering, plane, axis(1)).assignment.tolist() == expected


@pytest.mark.parametrize(("away", "expected"), [(9.0, [0, 1, 0, 1]), (0.0, [0, 0, 0, 0])])
def test_the_data_can_determine_the_number_of_clusters(away, expected):
    updates = {i: axis(i) + axis(4, away * (i % 2)) for i in range(4)}
    clustering = HierarchicalUpdates(0, num_clusters=None, choose="silhouette_or_one")
    assert clustered(clustering, updates, axis(0)).assignment.tolist() == expected


def test_ties_a_missing_update_and_no_updates_at_all():
    equal = {i: axis(0) for i in range(4)}
    assert clustered(HierarchicalUpdates(0, threshold=0.0, num_clusters=None), equal, axis(1)).num_clusters == 1
    state = clustered(HierarchicalUpdates(0, num_clusters=4), {i: axis(i) for i in (0, 2, 3)}, axis(1))
    assert state.assignment.tolist() == [0, -1, 1, 2] and state.num_clusters == 3
    with pytest.raises(ValueError, match="got no usable model"):
        clustered(HierarchicalUpdates(0), {}, axis(1))


class Counting(UploadTransform):
    """An upload transform that leaves uploads as they are and counts them."""

    def __init__(self):
        self.count = 0

    def encode(self, update, layout, draw):
        self.count += 1
        return update


def test_uploads_of_the_extra_round_go_through_the_transforms_and_no_guarantee_is_claimed(tmp_path):
    method, counting = fl_hc(1, num_clusters=2), Counting()
    method.exchange = ClusterModel(transforms=[counting])
    fit(blobs_module(), blobs(12), method, tmp_path, rounds=2, clients_per_round=5)
    assert counting.count == 5 + 12 + 5
    method.exchange = ClusterModel(transforms=[GaussianNoise(clip=1.0, sigma=1.0)])
    assert method.privacy_guarantee(2, 12) is None
    method.clustering = []
    assert method.privacy_guarantee(2, 12) is not None
