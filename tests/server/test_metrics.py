"""Summaries over clients, compared with numbers computed by hand."""

import numpy as np
import pytest

from lcfl.server.metrics import ClientMetrics, Evaluation, co_membership_jaccard, summarize


def metric(values, num_samples=None):
    number = len(values)
    return ClientMetrics(np.arange(number), np.array(values, dtype=float), np.array(num_samples or [1] * number))


def test_mean_weighted_std_and_worst():
    found = summarize("acc", metric([1.0, 0.5, 0.0], [1, 2, 5]))
    assert found == {
        "acc": pytest.approx(0.5),
        "acc_weighted": pytest.approx(2 / 8),
        "acc_std": pytest.approx(np.sqrt(1 / 6)),  # ddof 0
        "acc_worst10": pytest.approx(0.0),
    }


@pytest.mark.parametrize(("number", "counted"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3), (100, 10)])
def test_worst10_is_the_mean_of_the_lowest_tenth_rounded_up(number, counted):
    values = np.random.default_rng(0).permutation(number).astype(float)
    assert summarize("acc", metric(values))["acc_worst10"] == pytest.approx((counted - 1) / 2)
    assert np.isnan(summarize("acc", metric([*values, np.nan]))["acc_worst10"])


def test_evaluation_stores_clients_and_numbers_of_samples():
    evaluation = Evaluation()
    evaluation.add("val/own_split/personal", [2, 5], [{"loss": 1.0, "acc": 0.5}, {"loss": 3.0, "acc": 1.0}], [4, 12])
    assert list(evaluation.by_name) == ["val/own_split/personal/loss", "val/own_split/personal/acc"]
    found = evaluation.by_name["val/own_split/personal/acc"]
    assert (found.clients.tolist(), found.values.tolist(), found.num_samples.tolist()) == ([2, 5], [0.5, 1.0], [4, 12])


def test_loss_is_summarised_by_its_mean_only():
    evaluation = Evaluation()
    evaluation.add("val/own_split/personal", [2, 5], [{"loss": 1.0, "acc": 0.5}, {"loss": 3.0, "acc": 1.0}], [4, 12])
    assert evaluation.summary() == {
        "val/own_split/personal/loss": 2.0,
        "val/own_split/personal/acc": 0.75,
        "val/own_split/personal/acc_weighted": 0.875,
        "val/own_split/personal/acc_std": 0.25,
        "val/own_split/personal/acc_worst10": 0.5,
    }


def test_set_without_clients_is_left_out():
    evaluation = Evaluation()
    evaluation.add("val/own_split/personal", [], [], [])
    assert evaluation.summary() == {}


def test_stability_by_hand():
    # Pairs before: 01 02 12 34; after: 01 23 24 34. Both: 01, 34. Either: 01 02 12 34 23 24.
    before, after = np.array([0, 0, 0, 1, 1]), np.array([5, 5, 2, 2, 2])
    assert co_membership_jaccard(before, after) == pytest.approx(2 / 6)
    assert co_membership_jaccard(before, 7 - before) == 1.0
    assert co_membership_jaccard(np.arange(4), np.arange(4)) == 1.0
    assert co_membership_jaccard(np.arange(4), np.zeros(4, dtype=int)) == 0.0
    # Clients without a cluster (-1) share none. Pairs before: 01; after: 01 02 12. Both: 01.
    before, after = np.array([0, 0, -1, -1, -1]), np.array([0, 0, 0, 1, -1])
    assert co_membership_jaccard(before, after) == pytest.approx(1 / 3)
    assert co_membership_jaccard(after, before) == pytest.approx(1 / 3)


def test_a_client_that_lacks_a_metric_does_not_count_in_it():
    evaluation = Evaluation(directions={"mae": False})
    evaluation.add("test/own_split/global", [3, 7], [{"mae": 1.0, "r2": 0.5}, {"mae": 3.0}], [4, 1])
    assert evaluation.by_name["test/own_split/global/r2"].clients.tolist() == [3]
    row = evaluation.summary()
    assert row["test/own_split/global/r2"] == 0.5 and row["test/own_split/global/mae"] == 2
    assert row["test/own_split/global/mae_worst10"] == 3  # the largest error is the worst
