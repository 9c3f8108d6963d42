"""Tests that runs which should be equal are equal, bit for bit or up to rounding."""

from functools import cache, partial

import pytest
import torch
from torch import nn

import lcfl.methods.clustering.low_rank_cosine
from lcfl.methods.aggregation import ClusterMean, GlobalMean, ServerAdam, ServerMomentum, ServerYogi
from lcfl.methods.exchange import FullModel, SharedLayers
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from lcfl.models import MLP, SplitNetwork
from lcfl.models.module import FederatedModule
from tests.helpers.bits import assert_same_clients, assert_same_state
from tests.helpers.builders import (
    alone,
    apfl,
    blobs,
    blobs_module,
    dealt,
    ditto,
    fedac,
    fedamp,
    fedavg,
    feddyn,
    fedlc,
    fednova,
    fedopt,
    fedper,
    fedprox,
    fit,
    lcfed,
    lg_fedavg,
    linear_module,
    per_fedavg,
    scaffold,
    two_sided,
)
from tests.helpers.clustered import SAMPLES, cfl, cgpfl, cgpfl_prox, clove, fedgroup, fesem, fl_hc, ifca, pacfl
from tests.helpers.commandline import KINDS
from tests.methods.clustering.runs import assert_same_models
from tests.methods.clustering.test_one_shot import fedclust

# methods whose distinctive part is switched off


class NoisyNormed(SplitNetwork):
    """A network with dropout and batch normalisation, so that random streams and buffers matter."""

    def __init__(self):
        body = nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3))
        super().__init__(body, nn.Linear(12, 8))


def normed_run(tmp_path, method, cut="decision", momentum=0.0, **options):
    module = FederatedModule(NoisyNormed, partial(torch.optim.SGD, lr=0.05, momentum=momentum), cut=cut)
    options = {"rounds": 4, "clients_per_round": 5, **options}
    return fit(module, blobs(12, batch_size=10), method, tmp_path, **options).state


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Provides ``plain(fedavg or alone, **options)``: a run to compare with, made once."""
    return cache(lambda method, **options: normed_run(tmp_path_factory.mktemp("plain"), method(), **options))


EPOCHS = LocalTraining(epochs=1)
WARNINGS = ("ignore:method.exchange. Shared.* shares", "ignore:model.cut. NoisyNormed registers")


@pytest.mark.filterwarnings(*WARNINGS)
@pytest.mark.parametrize(
    ("method", "local", "cut"),
    [
        pytest.param(lcfed, alone, "decision", id="lcfed, no pulls"),
        pytest.param(partial(lcfed, local=EPOCHS), partial(alone, epochs=1), "decision", marks=pytest.mark.slow),
        pytest.param(partial(fedac, 3, refresh_every=2), alone, "decision", id="fedac, no pulls"),
        pytest.param(fedper, alone, "embedding.0", id="fedper, empty embedding"),
    ],
)
def test_methods_that_equal_local_bit_for_bit(tmp_path, plain, method, local, cut):
    own = plain(local, cut=cut)
    assert_same_clients(normed_run(tmp_path, method(), cut), own)
    assert 0 < len(list(own.clients)) < 12


@pytest.mark.filterwarnings(*WARNINGS)
@pytest.mark.parametrize(
    ("method", "cut"),
    [(fedprox, "decision"), (fedper, None), (partial(lg_fedavg, 3), "decision")],
    ids=["fedprox, mu 0", "fedper, empty head", "lg, all layers"],
)
def test_methods_that_equal_fedavg_bit_for_bit(tmp_path, plain, method, cut):
    mean, other = plain(fedavg, cut=cut), normed_run(tmp_path, method(), cut)
    assert torch.equal(other.global_model, mean.global_model)
    assert other.total_bytes == mean.total_bytes
    assert not torch.allclose(mean.global_model, mean.initial, atol=1e-2)


def test_fednova_with_equal_steps_is_fedavg_up_to_rounding(tmp_path, plain):
    mean, other = plain(fedavg, momentum=0.9), normed_run(tmp_path, fednova(), momentum=0.9)
    torch.testing.assert_close(other.global_model, mean.global_model, rtol=0, atol=1e-6)
    unequal = normed_run(tmp_path, fednova(stragglers=0.5, steps=3), momentum=0.9)
    assert not torch.allclose(unequal.global_model, mean.global_model, atol=1e-3)


@pytest.mark.parametrize(
    ("engine", "momentum"),
    [
        ("compiled", 0.0),
        ("stacked", 0.9),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("compiled", 0.9), ("stacked", 0.0))),
    ],
)
def test_the_other_engines_keep_these_equalities(tmp_path, engine, momentum):
    """Uses a plain network; dropout and batch normalisation make the tests above run in the sequential engine."""

    def run(method):
        module = FederatedModule(partial(MLP, 16, [16], 8), partial(torch.optim.SGD, lr=0.05, momentum=momentum))
        return fit(module, blobs(12), method, tmp_path, rounds=3, clients_per_round=5, engine=engine).state

    mean, own = run(fedavg()), run(alone())
    assert torch.equal(run(fedprox()).global_model, mean.global_model)
    assert not torch.allclose(mean.global_model, mean.initial, atol=1e-2)
    assert_same_clients(run(lcfed()), own)
    assert_same_clients(run(fedac(3, refresh_every=2)), own)
    torch.testing.assert_close(run(fednova()).global_model, mean.global_model, rtol=0, atol=1e-6)


def test_lg_fedavg_that_shares_the_embedding_is_fedper(tmp_path):
    """Checks that LG-FedAvg with the embedding's layers named as shared is FedPer."""
    named = Method(LocalTraining(steps=3), SharedLayers(["embedding"]), GlobalMean())
    assert_same_state(normed_run(tmp_path, named), normed_run(tmp_path, fedper()))


def test_if_all_stragglers_run_one_epoch_it_is_fedavg_with_one_epoch(tmp_path):
    one, all_straggle = (
        normed_run(tmp_path, fedavg(**local)) for local in ({"epochs": 1}, {"epochs": 2, "stragglers": 1.0})
    )
    assert_same_state(one, all_straggle)


def test_the_full_budget_equals_local_with_all_clients_sampled(tmp_path):
    every = {"clients_per_round": 1.0, "rounds": 2}
    assert_same_state(
        normed_run(tmp_path, alone(), **every), normed_run(tmp_path, alone(True), rounds=2, clients_per_round=3)
    )


def test_per_fedavg_without_an_inner_step_is_fedavg_on_the_second_batches(tmp_path):
    """Sets alpha = 0 and beta to the optimizer's rate.

    Only batch b2 then matters, and a client with one batch has no other batch.
    """
    inputs, targets, train, test = two_sided(3, size=8)
    runs = [
        fit(linear_module(0.3), dealt(inputs, targets, train, test=test), method, tmp_path, rounds=3).state
        for method in (fedavg(steps=2), per_fedavg(steps=2, inner_lr=0.0))
    ]
    torch.testing.assert_close(runs[0].global_model, runs[1].global_model, rtol=0, atol=1e-6)


def test_one_cluster_that_starts_from_its_centre_is_fedavg(tmp_path):
    """Compares the runs from the first centre on.

    This centre is the mean of the offline models, which FedAvg gets as its initial model.
    """
    local, mean = LocalTraining(steps=3, start="centre"), ClusterMean("participants", "participants")
    clustered = fit(blobs_module(), blobs(12), lcfed(1, local, mean), tmp_path, rounds=4, clients_per_round=5)

    class Warm(FederatedModule):
        def initial_model(self, seed, number=0):
            return clustered.history[0].centres[0]

    plain = Method(LocalTraining(steps=3), FullModel(), GlobalMean("uniform"))
    module = blobs_module()
    warm = Warm(module.make_network, module.optimizer)
    averaged = fit(warm, blobs(12), plain, tmp_path, rounds=4, clients_per_round=5)
    for left, right in zip(clustered.history[1:], averaged.history, strict=True):
        assert torch.equal(left.centres, right.centres)
        assert torch.equal(left.global_model, right.global_model)
    assert not torch.equal(averaged.history[0].global_model, averaged.history[-1].global_model)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """Provides ``averaged(weights)``: a run of FedAvg that weighs clients so, made once."""

    def run(weights):
        method = Method(LocalTraining(steps=3), FullModel(), GlobalMean(weights))
        return fit(blobs_module(), blobs(12), method, tmp_path_factory.mktemp(weights), rounds=4, clients_per_round=5)

    return cache(run)


NO_SPLIT = {"eps1": 0.0, "eps2": 0.0, "min_round": 0}


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        (ifca(1, max_redraws=10), "samples"),
        (clove(1), "samples"),
        (fl_hc(2, num_clusters=1), "samples"),
        (pacfl(threshold=180.0, num_clusters=None), "samples"),
        (fedclust(num_clusters=1), "samples"),
        (fesem(1), "uniform"),
        (fesem(1, mean=SAMPLES), "samples"),
        (cfl(**NO_SPLIT, stale_max=0), "uniform"),
        (cfl(**NO_SPLIT, stale_max=10), "uniform"),  # old updates are not applied again
    ],
    ids=["ifca", "clove", "fl_hc", "pacfl", "fedclust", "fesem", "fesem, samples", "cfl", "cfl, old updates"],
)
def test_one_cluster_is_fedavg_bit_for_bit(tmp_path, averaged, method, weights):
    """Runs without the models of warm-up rounds. Few clients take part, so most have not trained in the last round."""
    one, plain = fit(blobs_module(), blobs(12), method, tmp_path, rounds=4, clients_per_round=5), averaged(weights)
    history = [each for each in one.history if each.round >= 0]
    assert_same_models(history, plain.history)
    assert one.sampled == plain.sampled
    assert [one.state.clients[i].consumed for i in range(12)] == [plain.state.clients[i].consumed for i in range(12)]


# ties


def test_the_assignment_never_changes_while_all_similarities_tie(tmp_path, monkeypatch):
    monkeypatch.setattr(
        lcfl.methods.clustering.low_rank_cosine, "cosine", lambda codes, centres: torch.zeros(len(codes), len(centres))
    )
    method = lcfed(4, init="random")
    watch = fit(blobs_module(cluster_weight=0.5), blobs(12), method, tmp_path, rounds=3, clients_per_round=5)
    assert watch.history[0].assignment.bincount().tolist() == [3, 3, 3, 3]
    for each in watch.history:
        assert torch.equal(each.assignment, watch.history[0].assignment)


# the numbering of the clients


ALWAYS = {"eps1": 1e9, "eps2": 0.0, "min_round": 1, "gamma_max": 0.5}  # splits as soon as updates disagree
# Method, mu and lambda. FedALA is not among them, because it draws samples of the client's data by the client's number.
PERMUTED = {
    "fedavg": (partial(fedavg, steps=2), 0.0, 0.0),
    "local": (partial(alone, steps=2), 0.0, 0.0),
    "fedprox": (partial(fedprox, steps=2), 0.4, 0.0),
    "fednova": (partial(fednova, momentum=0.5, steps=2), 0.4, 0.0),
    "fedper": (partial(fedper, steps=2), 0.0, 0.0),
    "lg_fedavg": (partial(lg_fedavg, steps=2), 0.0, 0.0),
    "per_fedavg": (partial(per_fedavg, steps=2), 0.0, 0.0),
    "lcfed": (partial(lcfed, 2, LocalTraining(steps=2), dimension=3), 0.4, 0.2),
    "fedac": (partial(fedac, 2, LocalTraining(steps=2), dimension=3), 0.4, 0.2),
    "fedclust": (partial(fedclust, {"steps": 2}, num_clusters=2), 0.0, 0.0),
    "fesem": (partial(fesem, 2, steps=2), 0.0, 0.0),
    "fedgroup": (partial(fedgroup, 2, steps=2), 0.0, 0.0),
    "fl_hc": (partial(fl_hc, 1, LocalTraining(steps=2), num_clusters=2), 0.0, 0.0),
    "cgpfl": (partial(cgpfl, 2, steps=2), 0.0, 0.0),
    "cgpfl_prox": (partial(cgpfl_prox, 2, steps=2), 0.4, 0.0),
    "ifca": (partial(ifca, 2, steps=2), 0.0, 0.0),
    "clove": (partial(clove, 2, steps=2), 0.0, 0.0),
    "cfl": (partial(cfl, 2, **ALWAYS), 0.0, 0.0),
    "pacfl": (partial(pacfl, LocalTraining(steps=2), num_vectors=1, num_clusters=2), 0.0, 0.0),
    "scaffold": (partial(scaffold, steps=2), 0.0, 0.0),
    "feddyn": (partial(feddyn, steps=2), 0.4, 0.0),
    "fedlc": (partial(fedlc, steps=2), 0.0, 0.0),
    "fedavgm": (partial(fedopt, ServerMomentum(), steps=2), 0.0, 0.0),
    "fedadam": (partial(fedopt, ServerAdam(), steps=2), 0.0, 0.0),
    "fedyogi": (partial(fedopt, ServerYogi(), steps=2), 0.0, 0.0),
    "ditto": (partial(ditto, steps=2), 0.4, 0.0),
    "apfl": (partial(apfl, steps=2), 0.0, 0.0),
    "fedamp": (partial(fedamp, steps=2), 0.4, 0.0),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in KINDS else [pytest.mark.slow]) for name in PERMUTED]
)
def test_permuting_the_clients_permutes_the_results(tmp_path, name):
    """Gives every client one batch, so that no random draw depends on its number."""
    inputs, targets, train, test = two_sided(6, size=8)
    train = [share[: 8 - i] for i, share in enumerate(train)]  # different sizes, so that the weights are permuted too
    order = [4, 2, 0, 5, 1, 3]
    method, mu, lam = PERMUTED[name]
    module = linear_module(0.3, cluster_weight=mu, global_weight=lam)
    plain = fit(module, dealt(inputs, targets, train, test=test), method(), tmp_path, rounds=3).state
    moved_data = dealt(inputs, targets, [train[i] for i in order], test=[test[i] for i in order])
    moved = fit(module, moved_data, method(), tmp_path, rounds=3).state
    torch.testing.assert_close(moved.global_model, plain.global_model, rtol=0, atol=1e-6)
    for new, old in enumerate(order):
        torch.testing.assert_close(moved.centre_of(new), plain.centre_of(old), rtol=0, atol=1e-6)
        if plain.clients[old].model is not None:
            torch.testing.assert_close(moved.clients[new].model, plain.clients[old].model, rtol=0, atol=1e-6)
    learnt = plain.clients[0].model if name == "local" else plain.centre_of(0)
    assert not torch.allclose(learnt, plain.initial, atol=1e-2)
    assert (len(plain.assignment.unique()) > 1) is method().is_clustered
