"""Tests of round 0, in which equal centres and models would make all similarities tie (reading A26)."""

import pytest
import torch

from lcfl.core import rng
from lcfl.methods.clustering import LossVectorKMeans, LowRankCosine
from lcfl.methods.exchange import AllCentres
from lcfl.methods.local import envelope, meta, training
from lcfl.methods.local.training import starting_model
from tests.helpers.builders import (
    alone,
    blobs,
    blobs_module,
    fedac,
    fedavg,
    fedbabu,
    fednova,
    fedper,
    fedprox,
    fit,
    lcfed,
    lg_fedavg,
    per_fedavg,
)
from tests.helpers.clustered import cfl, cgpfl, cgpfl_prox, clove, fedgroup, fesem, fl_hc, ifca, pacfl
from tests.methods.clustering.test_one_shot import fedclust
from tests.methods.test_ascfl import ascfl

BASELINES = [fedprox(), fednova(), fedper(), fedbabu(), lg_fedavg(), per_fedavg()]
BASELINES += [ifca(max_redraws=1), fesem(), cfl(), fedgroup(clients_per_group=1), fl_hc(1), pacfl(), cgpfl()]
BASELINES += [cgpfl_prox(), clove()]


def first_rounds(tmp_path, method=None, rounds=1, **options):
    module = blobs_module(cluster_weight=0.5, global_weight=0.1)
    options = {"clients_per_round": 5, **options}
    return fit(module, blobs(12), method or lcfed(4), tmp_path, rounds=rounds, **options)


def test_lcfed_does_not_collapse_into_one_cluster(tmp_path):
    watch = first_rounds(tmp_path)
    warmup, first = watch.history
    assert (warmup.round, first.round) == (-1, 0)
    for each in (warmup, first):
        # the four true groups are 0-2, 3-5, 6-8 and 9-11; k-means decides which number a group gets
        groups = each.assignment.reshape(4, 3)
        assert groups.tolist() == [[number] * 3 for number in groups[:, 0].tolist()]
        assert sorted(groups[:, 0].tolist()) == [0, 1, 2, 3]
        assert len(each.centres.unique(dim=0)) == 4
    assert first.row["cluster/count"] == 4
    assert first.row["cluster/moved"] == 0
    assert first.row["cluster/ari"] == 1


def test_before_round_0_phi_is_the_initial_embedding_and_no_client_has_a_model(tmp_path):
    watch = first_rounds(tmp_path, rounds=0)
    state = watch.state
    assert torch.equal(state.global_model, state.initial)
    assert list(state.clients) == []
    assert not state.participated.any()
    assert state.round == 0


def test_after_round_0_only_sampled_clients_have_taken_part(tmp_path):
    watch = first_rounds(tmp_path)
    sampled, state = watch.sampled[0], watch.state
    assert len(sampled) == 5
    assert torch.nonzero(state.participated).flatten().tolist() == sampled == list(state.clients)
    means = torch.stack([state.clients[i].model for i in sampled]).mean(dim=0)
    torch.testing.assert_close(state.global_model, means)
    warmup = watch.history[0]
    for cluster in range(4):
        members = [i for i in sampled if state.assignment[i] == cluster]
        if members:
            mean = torch.stack([state.clients[i].model for i in members]).mean(dim=0)
            torch.testing.assert_close(state.centres[cluster], mean)
        else:
            assert torch.equal(state.centres[cluster], warmup.centres[cluster])


class LiteralStart(LowRankCosine):
    """Sets all centres to the initial model, as Algorithm 1 line 1 reads."""

    def on_extra_round_end(self, server, state, uploads):
        super().on_extra_round_end(server, state, uploads)
        state.centres = state.initial.repeat(self.num_clusters, 1)


@pytest.mark.parametrize("init", ["kmeans", "random"])
def test_identical_centres_leave_the_assignment_unchanged(tmp_path, init):
    method = lcfed(4)
    method.clustering = [LiteralStart(4, 8, init=init)]
    warmup, first = first_rounds(tmp_path, method).history
    assert len(warmup.centres.unique(dim=0)) == 1
    assert torch.equal(warmup.assignment, first.assignment)
    assert len(first.assignment.unique()) == 4
    assert len(first.centres.unique(dim=0)) > 1


def test_fedac_keeps_a_balanced_random_assignment_until_enough_clients_took_part(tmp_path):
    watch = first_rounds(tmp_path, fedac(4), rounds=4)
    first, state = watch.history[0], watch.state
    assert first.assignment.bincount().tolist() == [3, 3, 3, 3]
    seen = [len({i for earlier in range(t + 1) for i in watch.sampled[earlier]}) for t in range(4)]
    fitted = next(t for t, number in enumerate(seen) if number >= 2 * 4)
    assert fitted > 0 and seen[-1] < 12
    for each in watch.history[:fitted]:
        assert torch.equal(each.assignment, first.assignment)
    assert not torch.equal(watch.history[fitted].assignment, first.assignment)
    for cluster in range(4):
        members = [i for i in watch.sampled[0] if first.assignment[i] == cluster]
        assert torch.equal(first.centres[cluster], state.initial) == (not members)
    never = torch.nonzero(~state.participated).flatten()
    assert torch.equal(state.assignment[never], first.assignment[never])


@pytest.mark.parametrize(("method", "shared"), [(fedper, slice(0, 272)), (lg_fedavg, slice(272, 408))])
def test_a_client_that_was_never_sampled_has_the_shared_part_and_the_initial_rest(tmp_path, method, shared):
    watch = fit(blobs_module(), blobs(12), method(), tmp_path, rounds=1, clients_per_round=5)
    state, exchange, layout = watch.state, watch.server.method.exchange, watch.server.layout
    for client in range(12):
        model = exchange.personal(state, client, layout)
        assert torch.equal(model[shared], state.global_model[shared])
        assert not torch.equal(model[shared], state.initial[shared])
        rest = torch.ones(408, dtype=torch.bool)
        rest[shared] = False
        new = client not in watch.sampled[0]
        assert torch.equal(model[rest], state.initial[rest]) == new
        assert torch.equal(state.clients[client].model, state.initial) == new
    assert torch.equal(state.global_model[rest], state.initial[rest])


@pytest.fixture
def starts(monkeypatch):
    """Records the models that local runs start from, in the order of the runs."""
    seen = []

    def watched(*arguments):
        seen.append(starting_model(*arguments))
        return seen[-1]

    for module in (training, meta, envelope):
        monkeypatch.setattr(module, "starting_model", watched)
    return seen


OTHERS = [fedavg(), alone(), lcfed(4), lcfed(4, init="random", offline_clients=3, dimension=2)]
OTHERS += [fedac(4), fedclust(num_clusters=4), ascfl(incentive=False)]


@pytest.mark.filterwarnings("ignore:ClientChoice. after 1 redraws")
@pytest.mark.parametrize("method", [*OTHERS, *BASELINES], ids=lambda method: type(method.exchange).__name__)
def test_every_method_samples_the_same_clients_and_starts_from_the_same_initial_model(tmp_path, starts, method):
    """With IFCA and CLoVE, a client starts from one of the cluster models.

    They are drawn like the initial model, each with its own number.
    """
    module = blobs_module()
    watch = fit(module, blobs(12), method, tmp_path, rounds=2, clients_per_round=5)
    draws = {t: sorted(rng.generator(0, "sample", t).choice(12, 5, replace=False).tolist()) for t in (0, 1)}
    assert watch.sampled == draws and draws[0] != draws[1]
    number_of = {module.initial_model(0, number).numpy().tobytes(): number for number in range(20)}
    first = [number_of[start.numpy().tobytes()] for start in starts[:5]]
    assert watch.state.initial.numpy().tobytes() in number_of
    if isinstance(method.exchange, AllCentres) or any(isinstance(each, LossVectorKMeans) for each in method.clustering):
        assert len(set(first)) > 1
    else:
        assert set(first) == {0}


def test_the_initial_model_and_the_sampled_clients_depend_on_the_seed(tmp_path):
    runs = [fit(blobs_module(), blobs(12), fedavg(), tmp_path, clients_per_round=5, seed=seed) for seed in (0, 1)]
    assert not torch.equal(*(run.state.initial for run in runs))
    assert runs[0].sampled != runs[1].sampled
