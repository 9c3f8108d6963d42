"""Tests of IFCA: the random models to choose from, redraws, a whole run in numpy, and exact properties."""

import numpy as np
import pytest
import torch

from lcfl.core.messages import Uplink
from lcfl.methods.clustering import ChoiceBeforeTraining, ClientChoice
from lcfl.methods.exchange import ClusterModel, ControlledClusterModel, EnvelopeModel
from lcfl.methods.local import ControlledTraining, DittoTraining, LocalTraining
from lcfl.methods.method import Method
from lcfl.runs.serialization import plain_copy
from tests.helpers.bits import same
from tests.helpers.builders import blobs, blobs_module, dealt, fit, linear_module, linear_step, state_of
from tests.helpers.clustered import SAMPLES, Evaluations, ifca
from tests.helpers.fits import ROUNDS, assert_same_run
from tests.helpers.fits import fit as fit_by_command
from tests.methods.in_numpy import Clients

CLIENTS = Clients(6, 4, 6)


def in_numpy(module, rounds, num_clusters=2):
    """Runs IFCA with full batches: choice by training loss, descent, means weighted by samples.

    Returns the centres and choices of each round.
    """
    omega = np.stack([module.initial_model(0, k).double().numpy() for k in range(num_clusters)])
    history = []
    for _ in range(rounds):
        j = [int(np.argmin([CLIENTS.loss(w, i) for w in omega])) for i in range(3)]
        w = [CLIENTS.trained(omega[j[i]], i, 2) for i in range(3)]
        for k in set(j):
            members = [i for i in range(3) if j[i] == k]
            omega[k] = CLIENTS.mean(w, members)
        history.append((omega.copy(), j))
    return history


def test_three_rounds_match_numpy(tmp_path):
    module, evaluations = linear_module(lr=0.5), Evaluations()
    data = CLIENTS.data()
    watch = fit(module, data, ifca(2, steps=2), tmp_path, rounds=3, callbacks=[evaluations])
    expected = in_numpy(module, 3)
    for each, (omega, j) in zip(watch.history, expected, strict=True):
        np.testing.assert_allclose(each.centres, omega, atol=2e-6)
        assert each.assignment.tolist() == j
    assert {tuple(j) for _, j in expected} != {(0, 0, 0)}
    assert watch.history[0].row["cluster/moved"] == 3  # all clients moved from no cluster
    omega = expected[-1][0]
    best = [omega[int(np.argmin([CLIENTS.loss(w, i) for w in omega]))] for i in range(3)]
    values = evaluations.found[-1].by_name["test/own_split/cluster/loss"].values
    np.testing.assert_allclose(values, [CLIENTS.loss(w, i, CLIENTS.test) for i, w in enumerate(best)], rtol=1e-4)


def test_the_models_differ_and_the_first_is_the_common_initial_model(tmp_path):
    module = blobs_module()
    state = fit(module, blobs(12), ifca(4), tmp_path, rounds=0).state
    assert same(state.centres[0], module.initial_model(0))
    assert len(state.centres.unique(dim=0)) == 4
    assert state.assignment.tolist() == [-1] * 12


def test_equal_initial_models_are_refused(tmp_path):
    torch.save(blobs_module().network.state_dict(), tmp_path / "weights.pt")
    module = blobs_module(init_from=tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"remove model\.init_from, or name the head in model\.init_except"):
        fit(module, blobs(12), ifca(2), tmp_path)
    fit(module, blobs(12), ifca(1), tmp_path)


def test_redraws_are_extra_rounds_of_all_clients_and_counted_in_round_0(tmp_path):
    with pytest.warns(UserWarning, match="after 2 redraws, no draw of 6 initial models.*Try fewer clusters"):
        watch = fit(blobs_module(), blobs(12), ifca(6, 2, 1.0), tmp_path, rounds=2, clients_per_round=5)
    size, first, second = watch.state.initial.numel(), *watch.rows
    assert first["cluster/redraws"] == 2 and "cluster/redraws" not in second
    assert first["comm/down_bytes"] == (3 * 12 + 5) * 6 * 4 * size
    assert first["comm/up_bytes"] == 3 * 12 * 4 + 5 * (4 * size + 4)
    assert second["comm/down_bytes"] == 5 * 6 * 4 * size
    assert watch.state.total_bytes == sum(row["comm/down_bytes"] + row["comm/up_bytes"] for row in watch.rows)
    assert [each.round for each in watch.history] == [0, 1]
    assert not watch.history[0].participated.all()


class Drawing:
    """A server whose initial model with number n is n."""

    seed = 0

    def __init__(self):
        self.logged = {}

    def initial_model(self, number):
        return torch.tensor([float(number)])

    def log(self, name, value):
        self.logged[name] = value


def chose(clustering, server, state, clusters):
    uploads = [Uplink(i, {"cluster": torch.tensor(cluster)}, 1) for i, cluster in enumerate(clusters)]
    clustering.on_extra_round_end(server, state, uploads)


def began(max_redraws, min_share=0.4):
    clustering, server, state = ClientChoice(2, max_redraws, min_share), Drawing(), state_of([], [0] * 10, [[0.0]])
    state.round = 0
    clustering.on_fit_start(server, state)
    return clustering, server, state


def test_a_draw_is_kept_if_every_model_has_its_share():
    clustering, server, state = began(5)
    assert list(clustering.extra_round(state, []).clients) == list(range(10))
    chose(clustering, server, state, [0] * 9 + [1])  # 1 < 0.4 * 10 / 2
    assert state.centres.tolist() == [[2.0], [3.0]] and clustering.extra_round(state, []) is not None
    chose(clustering, server, state, [0] * 8 + [1] * 2)
    assert state.centres.tolist() == [[2.0], [3.0]] and clustering.extra_round(state, []) is None
    assert server.logged == {"cluster/redraws": 1}


def test_a_draw_that_nobody_answered_is_not_good_enough():
    clustering, server, state = began(5)
    chose(clustering, server, state, [])
    assert clustering.extra_round(state, []) is not None
    chose(clustering, server, state, [0, 1])
    assert clustering.extra_round(state, []) is None and server.logged == {"cluster/redraws": 1}


def test_the_best_draw_is_kept_if_none_is_good_enough():
    clustering, server, state = began(2, min_share=1.0)
    chose(clustering, server, state, [0] * 9 + [1])
    chose(clustering, server, state, [0] * 7 + [1] * 3)
    with pytest.warns(UserWarning, match="draw 1, whose least chosen model was chosen by 3 of 10"):
        chose(clustering, server, state, [1] * 10)
    assert state.centres.tolist() == [[2.0], [3.0]] and clustering.extra_round(state, []) is None


def test_clusters_that_no_client_chose_keep_their_model(tmp_path):
    watch = fit(blobs_module(), blobs(12), ifca(5), tmp_path, rounds=1, clients_per_round=2)
    chosen = set(watch.state.assignment.tolist()) - {-1}
    for k in range(5):
        assert same(watch.state.centres[k], blobs_module().initial_model(0, k)) is (k not in chosen)
    assert int((watch.state.assignment >= 0).sum()) == 2


def test_evaluation_lets_all_clients_choose_and_changes_nothing(tmp_path):
    evaluations = Evaluations()
    options = {"rounds": 3, "clients_per_round": 2}
    quiet = fit(blobs_module(), blobs(12), ifca(3), tmp_path, **options)
    loud = fit(blobs_module(), blobs(12), ifca(3), tmp_path, evaluate_every=1, callbacks=[evaluations], **options)
    assert same(quiet.state.centres, loud.state.centres) and same(quiet.state.assignment, loud.state.assignment)
    assert quiet.state.total_bytes == loud.state.total_bytes
    assert len(evaluations.found[0].by_name["test/own_split/cluster/acc"].values) == 12


def test_a_client_that_was_not_sampled_is_evaluated_with_the_model_of_least_training_loss(tmp_path):
    evaluations, data = Evaluations(), CLIENTS.data()
    watch = fit(linear_module(), data, ifca(3, steps=2), tmp_path, clients_per_round=1, callbacks=[evaluations])
    assert (watch.state.assignment < 0).sum() == 2
    omega = watch.state.centres.double().numpy()
    best = [omega[int(np.argmin([CLIENTS.loss(w, i) for w in omega]))] for i in range(3)]
    values = evaluations.found[-1].by_name["test/own_split/cluster/loss"].values
    np.testing.assert_allclose(values, [CLIENTS.loss(w, i, CLIENTS.test) for i, w in enumerate(best)], rtol=1e-4)


def test_the_choice_does_not_use_test_data(tmp_path):
    """This holds in training and in evaluation. Public code lets clients choose by their test data in evaluation."""
    wrong = CLIENTS.targets.copy()
    for share in CLIENTS.test:
        wrong[share] = 1 - wrong[share]
    runs, found = [], []
    for targets in (CLIENTS.targets, wrong):
        evaluations, data = Evaluations(), dealt(CLIENTS.inputs, targets, CLIENTS.train, test=CLIENTS.test)
        runs.append(fit(linear_module(), data, ifca(3), tmp_path, callbacks=[evaluations]))
        found.append(evaluations.found[-1].by_name["test/own_split/cluster/loss"].values)
    assert same(runs[0].state.assignment, runs[1].state.assignment)
    assert same(runs[0].state.centres, runs[1].state.centres)
    omega = runs[1].state.centres.double().numpy()
    train_iK = np.array([[CLIENTS.loss(w, i) for w in omega] for i in range(3)])
    for targets, values in zip((CLIENTS.targets, wrong), found, strict=True):
        test_iK = np.array(
            [
                [linear_step(w, CLIENTS.inputs[CLIENTS.test[i]], targets[CLIENTS.test[i]])[0] for w in omega]
                for i in range(3)
            ]
        )
        np.testing.assert_allclose(values, test_iK[range(3), train_iK.argmin(axis=1)], rtol=1e-4)
    assert (test_iK.argmin(axis=1) != train_iK.argmin(axis=1)).any()


def test_redraws_are_part_of_a_checkpoint():
    clustering, server, state = began(5)
    chose(clustering, server, state, [0] * 10)
    other = ClientChoice(2, 5)
    other.load_state_dict(clustering.state_dict())
    assert other.state_dict() == {"draw": 1, "least": [0], "is_settled": False}
    assert plain_copy(clustering.state_dict(), "ClientChoice") == clustering.state_dict()


def chosen_before(local=None, exchange=None, num_clusters=3, **options):
    clustering = ChoiceBeforeTraining(num_clusters, **options)
    return Method(local or LocalTraining(steps=3), exchange or ClusterModel(), SAMPLES, [clustering])


@pytest.mark.parametrize("options", [{"max_redraws": 0}, {"max_redraws": 3, "min_share": 1.0}])
@pytest.mark.filterwarnings("ignore:ClientChoice. after")
def test_a_choice_before_training_gives_the_bits_of_ifca(tmp_path, options):
    runs = []
    for name, method in (("ifca", ifca(3, **options)), ("before", chosen_before(**options))):
        runs.append(fit(blobs_module(), blobs(12), method, tmp_path / name, rounds=4, clients_per_round=5))
    for one, other in zip(*(watch.history for watch in runs), strict=True):
        assert same(one.centres, other.centres) and same(one.assignment, other.assignment)
        assert same(one.global_model, other.global_model)
    model, down = blobs_module().layout.size * 4, "comm/down_bytes"
    assert runs[1].rows[-1][down] == runs[0].rows[-1][down] + 5 * model
    assert runs[1].rows[-1]["comm/up_bytes"] == runs[0].rows[-1]["comm/up_bytes"]


@pytest.mark.parametrize(
    ("local", "exchange"),
    [(DittoTraining(steps=5), EnvelopeModel()), (ControlledTraining(steps=5), ControlledClusterModel())],
)
def test_ifca_goes_with_other_local_updates(tmp_path, local, exchange):
    method, module = chosen_before(local, exchange, num_clusters=4), blobs_module(cluster_weight=0.1)
    watch = fit(module, blobs(12), method, tmp_path, rounds=20)
    assert watch.rows[-1]["cluster/count"] > 1
    assert watch.metrics[f"test/own_split/{exchange.reported[0]}/acc"] > 0.9


@pytest.mark.slow
def test_a_choice_before_training_has_the_same_bits_on_two_ranks_and_after_a_resume(tmp_path):
    clustering = "{class_path: ChoiceBeforeTraining, init_args: {num_clusters: 3}}"
    words = ("-c", f"method: {{clustering: [{clustering}]}}")
    one = fit_by_command(tmp_path / "1", "fesem", 1, ROUNDS, *words).path
    assert_same_run(one, fit_by_command(tmp_path / "2", "fesem", 2, ROUNDS, *words).path)
    fit_by_command(tmp_path / "3", "fesem", 1, 4, *words)
    assert_same_run(one, fit_by_command(tmp_path / "3", "fesem", 1, ROUNDS, *words, "--ckpt_path=last").path)
