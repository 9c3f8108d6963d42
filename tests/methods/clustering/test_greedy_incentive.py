"""Tests of AS-CFL's greedy clusters: formulas by hand, which clients a seed admits, and what missing clients keep."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lcfl.core.messages import Downlink, Uplink
from lcfl.methods.clustering import GreedyIncentive
from lcfl.methods.clustering.greedy_incentive import admits, candidates_of, representativeness, update_similarity
from lcfl.methods.clustering.similarity import leading_coordinates
from lcfl.models import Layout
from tests.helpers.builders import linear, state_of
from tests.methods.clustering.models import LAYOUT, SIZE

FACTORISED = ("updates", "similarities")


def update(*decision, embedding=0.0):
    return torch.tensor([embedding] * 9 + [*map(float, decision)] + [0.0] * (8 - len(decision)))


def answered(client, change, num_samples=1, start=None):
    start = torch.zeros(SIZE) if start is None else start
    return Uplink(client, {"update": change}, num_samples, Downlink({"model": start}))


class Proxy(SimpleNamespace):
    """A server whose proxy set gives a model the accuracy `score(model)`. It keeps the tested models."""

    def __init__(self, score=lambda model: 0.5, has_proxy=True, layout=LAYOUT):
        super().__init__(score=score, has_proxy=has_proxy, layout=layout, seed=0, logged={}, tested=[])

    def log(self, name, value):
        self.logged[name] = value

    def proxy_score(self, models):
        self.tested += [model.clone() for model in models]
        return [float(self.score(model)) for model in models]


def state(num_clients, assignment=None, centres=None):
    assignment = [0] * num_clients if assignment is None else assignment
    centres = torch.zeros(max(assignment) + 1, SIZE) if centres is None else centres
    return state_of([None] * num_clients, assignment, centres, [True] * num_clients)


def grouped(uploads, server=None, s=None, **options):
    s = s or state(len(uploads))
    GreedyIncentive(**options).on_round_end(server or Proxy(), s, uploads)
    return s


def partition(s):
    return sorted(sorted(torch.nonzero(s.assignment == k).flatten().tolist()) for k in s.assignment.unique().tolist())


# formulas


def test_equal_clients_tie_exactly_and_the_lower_number_wins():
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        similarity = update_similarity(torch.randn(2, 40, generator=draw), 0.95, "updates")
        scores = representativeness(similarity, torch.full((2,), 7.0, dtype=torch.float64))
        assert scores[0] == scores[1] and scores.argmax() == 0
    zero = update_similarity(torch.stack([torch.zeros(40), torch.ones(40)]), 0.95, "updates")
    assert zero.tolist() == [[0, 0], [0, 1]]


def test_representativeness_by_hand():
    similarity = torch.tensor([[1.0, 0.5, 0.0], [0.5, 1.0, -1.0], [0.0, -1.0, 1.0]], dtype=torch.float64)
    score = representativeness(similarity, torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64))
    assert score.tolist() == [0.375, (0.5 + 1 - 2) / 4, (-1 + 2) / 4]


@pytest.mark.parametrize(("left", "number"), [(1, 1), (4, 1), (5, 1), (6, 2), (19, 4), (20, 4), (21, 5)])
def test_a_fifth_of_the_unassigned_clients_rounded_up_are_candidates(left, number):
    assert len(candidates_of(torch.zeros(left), range(left), 0.2)) == number


def test_candidates_come_in_descending_order_and_ties_by_number():
    similarity = torch.tensor([0.1, 0.9, 0.5, 0.9, -1.0])
    assert candidates_of(similarity, [0, 1, 2, 3, 4], 0.8) == [1, 3, 2, 0]
    assert candidates_of(similarity, [4, 0], 0.2) == [0]


@pytest.mark.parametrize(
    ("accuracy", "current", "best", "relative", "strict"),
    [
        (0.90, 0.86, 0.90, True, True),
        (0.90, 0.88, 0.90, True, False),  # rises by less than 3 %
        (0.10, 0.10, 0.10, True, False),  # an untrained model
        (0.68, 0.60, 0.70, True, False),  # below theta, as on EMNIST
        (0.50, 0.52, 0.60, False, False),  # below 0.85 of the best, 0.51
        (0.55, 0.59, 0.60, False, False),  # loses 4 %
        (0.57, 0.59, 0.60, True, False),
    ],
)
def test_the_two_rules(accuracy, current, best, relative, strict):
    assert admits(accuracy, current, best, 0.85, 0.03, "relative") == relative
    assert admits(accuracy, current, best, 0.85, 0.03, "strict") == strict


def test_leading_components_keep_the_requested_variance():
    rows = torch.zeros(3, 5)
    rows[0, 0], rows[1, 1], rows[2, 2] = 3.0, 2.0, 1.0  # 9, 4 and 1 of 14
    assert [leading_coordinates(rows, share).shape[1] for share in (0.6, 0.9, 0.95, None)] == [1, 2, 3, 3]
    whole = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).double()
    code = leading_coordinates(whole, None)
    torch.testing.assert_close(code @ code.T, whole @ whole.T)
    left, values, _ = np.linalg.svd(whole.numpy(), full_matrices=False)
    rank = int(np.searchsorted(np.cumsum(values**2) / (values**2).sum(), 0.95)) + 1
    expected = (left[:, :rank] * values[:rank]) @ (left[:, :rank] * values[:rank]).T
    code = leading_coordinates(whole, 0.95)
    assert code.shape[1] == rank
    np.testing.assert_allclose(code @ code.T, expected, atol=1e-9)
    assert leading_coordinates(torch.zeros(3, 4), 0.95).shape == (3, 0)


# which clients a seed admits


def test_all_clients_form_one_cluster_if_none_does_harm():
    uploads = [answered(i, update(1, 0.1 * i)) for i in range(7)]
    server = Proxy()
    assert partition(grouped(uploads, server)) == [list(range(7))]
    assert server.logged == {"cluster/admitted": 6, "cluster/tested_models": 7}


def test_the_first_candidate_that_fails_ends_the_cluster():
    # Client 3 is least like the others, and any model that contains its update is bad.
    changes = [update(1), update(1, 0.1), update(1, 0.2), update(0, -1)]
    server = Proxy(score=lambda model: 0.1 if model[10] < 0 else 0.8)
    s = grouped([answered(i, change) for i, change in enumerate(changes)], server)
    assert partition(s) == [[0, 1, 2], [3]]
    # The seed is the most central client. Candidates follow one by one, each in a mean with those before it.
    assert torch.equal(server.tested[0], changes[0])
    torch.testing.assert_close(server.tested[1], (changes[0] + changes[1]) / 2)
    torch.testing.assert_close(server.tested[2], (changes[0] + changes[1] + changes[2]) / 3)
    torch.testing.assert_close(server.tested[3], sum(changes) / 4)
    assert torch.equal(server.tested[4], changes[3]) and len(server.tested) == 5


def test_the_mean_is_of_models_and_weighted_by_samples():
    uploads = [answered(0, update(1), 3, torch.ones(SIZE)), answered(1, update(2), 1, 5 * torch.ones(SIZE))]
    server = Proxy()
    grouped(uploads, server)
    torch.testing.assert_close(server.tested[1], (3 * (1 + update(1)) + (5 + update(2))) / 4)


def test_no_candidate_passes_the_printed_rule_from_an_untrained_model():
    uploads = [answered(i, update(1, 0.1 * i)) for i in range(5)]
    assert partition(grouped(uploads, Proxy(lambda model: 0.1), rule="strict")) == [[i] for i in range(5)]


def test_candidates_before_a_failure_in_the_same_draw_stay():
    # Six clients are unassigned, so a draw has two candidates. The second candidate of the second draw fails.
    changes = [update(1, 0.01 * i) for i in range(7)]
    accuracy = iter([0.5, 0.5, 0.5, 0.5, 0.1, 0.5, 0.5, 0.5])
    server = Proxy(score=lambda model: next(accuracy))
    s = grouped([answered(i, change) for i, change in enumerate(changes)], server, candidates=0.3)
    assert sorted(map(len, partition(s))) == [3, 4]
    assert server.logged["cluster/admitted"] == 5


@pytest.mark.parametrize("server", [Proxy(), Proxy(has_proxy=False)])
def test_without_incentive_each_draw_is_a_cluster(server):
    draw = torch.Generator().manual_seed(0)
    uploads = [answered(i, torch.randn(SIZE, generator=draw)) for i in range(20)]
    s = grouped(uploads, server, incentive=not server.has_proxy)
    assert sorted(map(len, partition(s))) == [1, 2, 2, 3, 3, 4, 5]  # 1 + ceil(0.2 * 19), 1 + ceil(0.2 * 14), ...
    assert server.tested == []


def test_similarity_uses_the_output_layer_all_layers_or_named_ones():
    changes = [update(1, embedding=5.0), update(1, embedding=-5.0), update(-1, embedding=5.0)]
    uploads = [answered(i, change) for i, change in enumerate(changes)]
    assert partition(grouped(uploads, incentive=False, candidates=0.5)) == [[0, 1], [2]]
    options = {"layers": "all", "explained_variance": None}
    for options["layers"] in ("all", "embedding", ["embedding"]):
        assert partition(grouped(uploads, incentive=False, candidates=0.5, **options)) == [[0, 2], [1]]


def test_either_updates_or_similarities_are_factorised():
    update_nP = np.random.default_rng(0).normal(size=(6, 9)) * 2.0 ** -np.arange(9)
    left, scale, _ = np.linalg.svd(update_nP, full_matrices=False)
    rank = int(np.argmax(np.cumsum(scale**2) >= 0.9 * np.sum(scale**2))) + 1
    assert 1 < rank < 5
    for factorised, rows in (("updates", left[:, :rank] * scale[:rank]), ("similarities", update_nP)):
        expected = rows @ rows.T / np.outer(np.linalg.norm(rows, axis=1), np.linalg.norm(rows, axis=1))
        if factorised == "similarities":
            value, vector = np.linalg.eigh(expected)  # its singular values, because it is positive semidefinite
            expected = (vector[:, -rank:] * value[-rank:]) @ vector[:, -rank:].T
        found = update_similarity(torch.from_numpy(update_nP), 0.9, factorised)
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    torch.testing.assert_close(*(update_similarity(torch.from_numpy(update_nP), None, each) for each in FACTORISED))


@pytest.mark.parametrize("factorised", FACTORISED)
def test_zero_updates_form_one_cluster(factorised):
    uploads = [answered(i, update(0)) for i in range(3)]
    assert partition(grouped(uploads, factorised=factorised)) == [[0, 1, 2]]


# numbers, missing clients, edge cases


def test_clusters_keep_the_number_that_most_members_had():
    changes = [update(1), update(1), update(-1), update(-1)]
    uploads = [answered(i, change) for i, change in enumerate(changes)]
    s = grouped(uploads, s=state(4, [1, 1, 0, 0]), incentive=False)
    assert s.assignment.tolist() == [1, 1, 0, 0]


def test_a_client_without_an_update_keeps_its_cluster():
    changes = [update(1), update(1), update(-1), update(-1)]
    centres = torch.arange(3.0).unsqueeze(1).repeat(1, SIZE)
    s = state(6, [1, 1, 0, 0, 1, 2], centres)
    grouped([answered(i, change) for i, change in enumerate(changes)], s=s, incentive=False)
    assert s.assignment.tolist() == [1, 1, 0, 0, 1, 2]
    assert s.centres[2].tolist() == [2.0] * SIZE  # none of its clients took part, so its model stays


def test_a_new_cluster_is_numbered_last_and_empty_ones_are_dropped():
    s = state(5, [1, 1, 1, 1, 1], torch.zeros(2, SIZE))
    grouped([answered(i, update(1 if i < 2 else -1)) for i in range(5)], s=s, incentive=False, candidates=0.25)
    assert s.num_clusters == 3 and sorted(s.assignment.unique().tolist()) == [0, 1, 2]
    assert [len(each) for each in partition(s)] == [2, 2, 1]


def test_a_client_without_a_cluster_joins_one():
    s = state(4, [0, 0, 0, 0])
    s.assignment[[2, 3]] = -1
    grouped([answered(i, update(1 if i < 2 else -1)) for i in range(4)], s=s, incentive=False, candidates=0.25)
    assert partition(s) == [[0, 1], [2, 3]] and s.num_clusters == 2


@pytest.mark.parametrize("num_clients", [1, 2])
def test_very_few_clients(num_clients):
    assert partition(grouped([answered(i, update(1)) for i in range(num_clients)])) == [list(range(num_clients))]


def test_a_round_without_uploads_changes_nothing():
    s = state(3, [0, 1, 1])
    GreedyIncentive().on_round_end(Proxy(), s, [])
    assert s.assignment.tolist() == [0, 1, 1]


def test_once_clusters_only_once_even_after_a_resume():
    uploads = [answered(i, update(1 if i < 2 else -1)) for i in range(4)]
    clustering, s = GreedyIncentive(incentive=False, once=True), state(4)
    clustering.on_round_end(Proxy(), s, uploads)
    assert partition(s) == [[0, 1], [2, 3]] and clustering.state_dict() == {"done": True}
    again = GreedyIncentive(incentive=False, once=True)
    again.load_state_dict(clustering.state_dict())
    again.on_round_end(Proxy(), s, [answered(i, update(1)) for i in range(4)])
    assert partition(s) == [[0, 1], [2, 3]]


def test_without_a_proxy_set_it_warns():
    with pytest.warns(UserWarning, match=r"without a proxy set no candidate can be tested.*Set data.proxy"):
        GreedyIncentive().on_fit_start(Proxy(has_proxy=False))


def test_layers_output_needs_an_output_layer():
    layout = Layout.from_network(linear(), cut=None)
    with pytest.raises(ValueError, match=r"GreedyIncentive got layers=output, but model.cut and model.trainable leave"):
        GreedyIncentive().check_layout(layout)
    GreedyIncentive(layers="all").check_layout(layout)


def test_named_layers_must_exist():
    layout = Layout.from_network(linear())
    with pytest.raises(ValueError, match=r"GreedyIncentive.layers: the trained part .* no layer or parameter 'fc9'"):
        GreedyIncentive(layers=["fc9"]).check_layout(layout)
    with pytest.raises(ValueError, match="the name of at least one layer"):
        GreedyIncentive(layers=[])


@pytest.mark.parametrize("explained", [None, 0.9])
def test_a_row_of_zeros_has_no_direction(explained):
    rows = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))
    rows[3] = 0
    code = leading_coordinates(rows, explained)
    assert not code[3].any() and code[[0, 1, 2, 4, 5, 6]].any(dim=1).all()
