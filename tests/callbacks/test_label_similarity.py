"""Comparison of model distances with label distributions, once at the end of a run."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from lcfl.callbacks import LabelSimilarity
from lcfl.callbacks.label_similarity import correlations
from lcfl.figures import label_similarity
from lcfl.methods.clustering.similarity import kl_divergence
from lcfl.methods.local import LocalTraining
from tests.helpers.builders import alone, blobs, blobs_module, fedavg, fednova, fedper, fedprox, fit, lcfed
from tests.helpers.clustered import ifca


@pytest.fixture
def not_drawn(monkeypatch):
    monkeypatch.setattr("lcfl.callbacks.label_similarity.figures.save", lambda figure, path: None)


def test_divergence_worked_by_hand():
    count_NC = torch.tensor([[1, 1], [3, 1], [2, 2]])
    expected = 0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25)
    back = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    divergence_NN = kl_divergence(count_NC)
    np.testing.assert_allclose(divergence_NN, [[0, expected, 0], [back, 0, back], [0, expected, 0]], atol=1e-15)


def test_divergence_is_infinite_for_a_class_that_the_other_lacks():
    divergence_NN = kl_divergence(torch.tensor([[2, 0], [1, 1]]))
    assert divergence_NN[0, 1] == pytest.approx(np.log(2))
    assert divergence_NN[1, 0] == np.inf


def test_correlations_are_over_all_pairs():
    draw = np.random.default_rng(0)
    divergence_NN, measure_NN = draw.random((5, 5)), draw.random((5, 5))
    found = correlations(torch.as_tensor(divergence_NN), {"l2": torch.as_tensor(measure_NN)})["l2"]
    pairs = [(i, j) for i in range(5) for j in range(i + 1, 5)]
    x = np.array([(divergence_NN[i, j] + divergence_NN[j, i]) / 2 for i, j in pairs])
    y = np.array([measure_NN[i, j] for i, j in pairs])
    assert found["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert found["spearman"] == pytest.approx(np.corrcoef(rankdata(x), rankdata(y))[0, 1])


def test_clients_with_equal_labels_have_no_correlation():
    same = {"pearson": None, "spearman": None}
    assert correlations(torch.zeros(3, 3), {"cosine": torch.rand(3, 3)}) == {"cosine": same}


@pytest.mark.parametrize("method", [pytest.param(fedavg, marks=pytest.mark.slow), lcfed])
def test_at_the_end_of_a_run_similar_labels_mean_similar_models(tmp_path, method):
    watch = fit(
        blobs_module(), blobs(12), method(), tmp_path, rounds=4,
        callbacks=[LabelSimilarity(LocalTraining(steps=20), dimension=5)],
    )  # fmt: skip
    (path,) = tmp_path.rglob("label_similarity.json")
    found = json.loads(path.read_text())
    assert found.keys() == {"l2", "cosine", "low_rank_cosine"}
    assert found["low_rank_cosine"]["pearson"] < -0.7
    assert found["l2"]["pearson"] > 0.7
    assert (path.parent / "figures" / "label_similarity.png").is_file()
    unobserved = fit(blobs_module(), blobs(12), method(), tmp_path / "without", rounds=4)
    assert torch.equal(watch.state.global_model, unobserved.state.global_model)


@pytest.mark.parametrize("method", [fedprox, ifca, fedper, fednova, lcfed, alone])
def test_fine_tuning_starts_from_the_model_that_is_sent(tmp_path, not_drawn, monkeypatch, method):
    """One step at a tiny rate hardly leaves it."""
    seen, data, fine_tuned = [], blobs(8), LabelSimilarity._fine_tuned

    def recorded(self, server, state, clients):
        seen.append(fine_tuned(self, server, state, clients))
        return torch.randn_like(seen[0])  # models that differ

    monkeypatch.setattr(LabelSimilarity, "_fine_tuned", recorded)
    tuning = LabelSimilarity(LocalTraining(steps=1))
    watch = fit(blobs_module(1e-9), data, method(), tmp_path, rounds=2, clients_per_round=4, callbacks=[tuning])
    state, exchange, layout = watch.state, watch.server.method.exchange, watch.server.layout
    for client, tuned in enumerate(seen[0]):
        if method is lcfed:
            expected = state.centre_of(client)
        elif method in (fedper, alone):
            expected = exchange.personal(state, client, layout)
        else:
            expected = state.global_model if method in (fedprox, fednova) else state.centre_of(client)
        torch.testing.assert_close(tuned, expected[: layout.num_parameters], rtol=0, atol=1e-6)


def test_method_that_sends_nothing_is_compared_by_the_clients_models(tmp_path, not_drawn):
    fit(blobs_module(), blobs(12), alone(), tmp_path, rounds=2, callbacks=[LabelSimilarity()])
    assert list(tmp_path.rglob("label_similarity.json"))


def test_newcomers_and_leavers_are_not_compared(tmp_path, not_drawn):
    class Compared(LabelSimilarity):
        def _fine_tuned(self, server, state, clients):
            self.clients = clients
            return super()._fine_tuned(server, state, clients)

    data, compared = blobs(12, newcomers=3), Compared(dimension=3)
    leaver = min(set(range(12)) - set(data.newcomer_clients))
    data = blobs(12, newcomers=3, leavers={leaver: 1})
    fit(blobs_module(), data, lcfed(2), tmp_path, rounds=2, callbacks=[compared])
    assert compared.clients == sorted(set(range(12)) - {leaver, *data.newcomer_clients})


def test_single_client_is_not_compared(tmp_path):
    with pytest.warns(UserWarning, match="LabelSimilarity: got 1 clients; it compares at least two"):
        watch = fit(blobs_module(), blobs(1), fedavg(), tmp_path, callbacks=[LabelSimilarity()])
    assert "test/own_split/global/acc" in watch.metrics and not list(tmp_path.rglob("label_similarity.json"))


def test_a_model_that_diverges_is_left_out_and_named(tmp_path, not_drawn):
    class Diverged(LabelSimilarity):
        def _fine_tuned(self, server, state, clients):
            model_nP = super()._fine_tuned(server, state, clients)
            model_nP[3, 5] = float("nan")
            return model_nP

        def measures(self, model_nP):
            self.compared = len(model_nP)
            return super().measures(model_nP)

    callback = Diverged(dimension=3)
    with pytest.warns(UserWarning, match=r"1 of 8 fine-tuned models are not finite \(3\); they are not compared"):
        fit(blobs_module(), blobs(8), fedavg(), tmp_path, callbacks=[callback])
    (path,) = tmp_path.rglob("label_similarity.json")
    assert callback.compared == 7 and np.isfinite(json.loads(path.read_text())["l2"]["pearson"])


def test_pictures_order_clients_by_their_most_frequent_class():
    count_NC = np.array([[0, 5], [9, 1], [1, 6]])
    matrix_NN = np.arange(9.0).reshape(3, 3)
    figure = label_similarity(count_NC, matrix_NN, matrix_NN, matrix_NN)
    counts, *matrices = (axes for axes in figure.axes if axes.get_title())
    np.testing.assert_array_equal(counts.images[0].get_array(), count_NC[[1, 0, 2]])
    for axes in matrices:
        np.testing.assert_array_equal(axes.images[0].get_array(), matrix_NN[np.ix_([1, 0, 2], [1, 0, 2])])
        assert axes.images[0].get_clim() == (1, 7)  # 0, 4 and 8 are the diagonal


def test_bad_settings_and_shapes_are_named():
    with pytest.raises(ValueError, match="got dimension=0"):
        LabelSimilarity(dimension=0)
    with pytest.raises(ValueError, match="got smoothing=0"):
        LabelSimilarity(smoothing=0)
    with pytest.raises(ValueError, match=r"label counts \(2, 2\) and matrices \(3, 3\)"):
        label_similarity(np.ones((2, 2)), np.ones((3, 3)), np.ones((2, 2)), np.ones((2, 2)))
