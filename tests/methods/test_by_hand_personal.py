"""Tests of APFL, FedALA and FedAMP against numpy, and of what they must have in common with other methods."""

from functools import partial

import numpy as np
import pytest
import torch

from lcfl.core import rng
from lcfl.methods import (
    AdaptiveInitialisation,
    AttentiveReference,
    CentreAndEmbedding,
    ClusterMean,
    ClusterReference,
    DittoTraining,
    EnvelopeModel,
    FullModel,
    GlobalMean,
    GlobalReference,
    InitialisedTraining,
    LocalTraining,
    Method,
    MixtureTraining,
)
from lcfl.methods.exchange.attentive import attentive_mean
from lcfl.methods.exchange.transforms import GaussianNoise
from lcfl.methods.local.training import LocalData
from lcfl.models.module import FederatedModule
from tests.helpers.builders import (
    alone,
    apfl,
    blobs,
    blobs_module,
    fedala,
    fedamp,
    fedavg,
    fit,
    linear,
    linear_module,
)
from tests.methods.clustering.test_one_shot import fedclust
from tests.methods.test_by_hand_baselines import (
    LR,
    SHARE,
    TRAIN,
    batches,
    close,
    loss_on_test,
    run,
    slope_of,
    started,
)

ENGINES = pytest.mark.parametrize("engine", ["sequential", "compiled", "stacked"])
P, DECISION = 17, slice(9, 17)


# APFL


@ENGINES
@pytest.mark.parametrize(("adapt", "momentum"), [("round", 0.0), ("step", 0.5), ("never", 0.0)])
def test_apfl_trains_a_mixture_and_its_share(tmp_path, engine, adapt, momentum):
    module = FederatedModule(linear, partial(torch.optim.SGD, lr=LR, momentum=momentum))
    watch = run(apfl(epochs=1, alpha=0.3, adapt=adapt), tmp_path, module, rounds=3, engine=engine, batch_size=2)
    w, v, alpha = started(module), [started(module)] * 2, [0.3, 0.3]
    for number, each in enumerate(watch.history):
        ends = []
        for i in (0, 1):
            own, of_w, of_v = w, 0.0, 0.0
            for step, rows in enumerate(batches(i, number * len(TRAIN[i]), 3 - i)):
                slope = slope_of(alpha[i] * v[i] + (1 - alpha[i]) * own, rows)
                change = LR * (v[i] - own) @ slope
                of_w, of_v = momentum * of_w + slope_of(own, rows), momentum * of_v + alpha[i] * slope
                own, v[i] = own - LR * of_w, v[i] - LR * of_v
                if adapt == "step" or (adapt == "round" and step == 0):
                    alpha[i] = np.clip(alpha[i] - change, 0, 1)
            ends.append(own)
        w = np.mean(ends, axis=0)
        close(each.global_model, w)
        assert each.row["train/alpha"] == pytest.approx(np.mean(alpha), abs=1e-6)
    for i, state in enumerate(watch.state.clients.states([0, 1])):
        close(state.model, alpha[i] * v[i] + (1 - alpha[i]) * ends[i])
        close(state.memory, [*v[i], alpha[i]])
    assert adapt == "never" or abs(alpha[0] - 0.3) > 0.01
    assert watch.rows[0]["comm/up_bytes"] == watch.rows[0]["comm/down_bytes"] == 4 * 2 * P


def test_the_share_of_the_own_model_stays_between_0_and_1(tmp_path):
    watch = fit(blobs_module(lr=0.5), blobs(6), apfl(steps=3, adapt="step"), tmp_path, rounds=6, clients_per_round=3)
    shares = [float(each.memory[-1]) for each in watch.state.clients.states(range(6)) if each.memory is not None]
    assert shares and all(0 <= share <= 1 for share in shares) and any(share != 0.5 for share in shares)


def test_without_a_share_apfl_is_fedavg_and_with_all_of_it_training_alone(tmp_path):
    one, other = (
        run(apfl(alpha=alpha, adapt="never"), tmp_path / str(alpha), rounds=3, batch_size=2) for alpha in (0.0, 1.0)
    )
    plain = run(
        Method(LocalTraining(steps=3), FullModel(), GlobalMean("uniform")), tmp_path / "plain", rounds=3, batch_size=2
    )
    single = run(alone(), tmp_path / "alone", rounds=3, batch_size=2)
    for each in (one, other):
        torch.testing.assert_close(each.state.global_model, plain.state.global_model)
    for own, expected in zip(*(each.state.clients.states([0, 1]) for each in (other, single)), strict=True):
        torch.testing.assert_close(own.model, expected.model)


# FedALA


def sample_of(client, number, size):
    drawn = rng.generator(0, "initialisation", number, client).permutation(len(TRAIN[client]))
    return TRAIN[client][drawn[:size]]


@ENGINES
@pytest.mark.parametrize("threshold", [1e-9, 10.0])
def test_fedala_learns_where_to_start(tmp_path, engine, threshold):
    """In round 0 nothing is learned. In round 1 there are 15 passes, or the fewest, and one in every later round."""
    eta, mu = 3.0, 0.2
    method = fedala(steps=2, share=0.7, weight_lr=eta, threshold=threshold, most_passes=15)
    module = linear_module(LR, cluster_weight=mu)
    watch = run(method, tmp_path, module, rounds=4, engine=engine, batch_size=2)
    w, own, weight = started(module), [started(module)] * 2, [np.ones(8), np.ones(8)]

    def blended(i, number, passes):
        chosen, start = sample_of(i, number, int(0.7 * len(TRAIN[i]))), w.copy()
        before, update = own[i][DECISION], w[DECISION] - own[i][DECISION]
        for _ in range(passes):
            for begin in range(0, len(chosen), 2):
                start[DECISION] = before + update * weight[i]
                slope = slope_of(start, chosen[begin : begin + 2])[DECISION]
                weight[i] = np.clip(weight[i] - eta * slope * update, 0, 1)
        start[DECISION] = before + update * weight[i]
        return start

    for number, each in enumerate(watch.history):
        passes = [0, 10 if threshold == 10 else 15, 1, 1][number]
        sent = w
        ends = []
        for i in (0, 1):
            end = blended(i, number, passes)
            for rows in batches(i, 4 * number, 2):
                end = end - LR * (slope_of(end, rows) + mu * (end - sent))
            ends.append(end)
        own, w = ends, SHARE @ ends
        close(each.global_model, w)
    for i, state in enumerate(watch.state.clients.states([0, 1])):
        close(state.model, own[i])
        np.testing.assert_allclose(state.memory, weight[i], atol=2e-5)
        assert 0 <= weight[i].min() < 0.99
    assert watch.rows[0]["comm/up_bytes"] == watch.rows[0]["comm/down_bytes"] == 4 * 2 * P
    expected = loss_on_test([blended(i, 4, 1) for i in (0, 1)])  # an evaluation starts as the next round would
    assert watch.metrics["test/own_split/personal/loss"] == pytest.approx(expected, rel=1e-4)
    assert abs(loss_on_test(own) / expected - 1) > 1e-3


def test_fedala_whose_weights_stay_at_one_is_fedavg(tmp_path):
    one = run(fedala(weight_lr=1e-30), tmp_path / "one", rounds=3, batch_size=2)
    other = run(fedavg(), tmp_path / "other", rounds=3, batch_size=2)
    torch.testing.assert_close(one.state.global_model, other.state.global_model)


def test_a_client_that_joins_late_learns_its_weights_at_length_once(tmp_path, monkeypatch):
    """The first learning is that of the first round in which a client has another model than it is sent."""
    lengths = {}

    class Counting(InitialisedTraining):
        def _has_converged(self, losses):
            lengths[id(losses)] = len(losses)
            return super()._has_converged(losses)

    method = Method(Counting(steps=1, threshold=1e-9, most_passes=12), ClusterReference(), GlobalMean())
    watch = fit(blobs_module(), blobs(6), method, tmp_path, rounds=5, clients_per_round=2, engine="sequential")
    learned = {i for number, sampled in watch.sampled.items() if number > 0 for i in sampled}
    assert {i for i in range(6) if watch.state.clients[i].memory is not None} == learned
    assert set(lengths.values()) == {12}


@pytest.mark.parametrize(("layers", "size"), [(1, 8), (2, 17), (["embedding"], 9)])
def test_fedala_blends_the_layers_that_it_is_given(tmp_path, layers, size):
    watch = run(fedala(steps=1, layers=layers), tmp_path, rounds=2)
    assert [len(state.memory) for state in watch.state.clients.states([0, 1])] == [size, size]


def test_a_short_batch_is_left_out_of_the_learning_if_the_data_ask_for_it():
    update = AdaptiveInitialisation(share=1.0)
    for drop_last, sizes in ((False, [4, 4, 2]), (True, [4, 4])):
        data = LocalData(np.arange(100, 110), 4, 0, 3, drop_last)
        drawn = update._batches(data)
        assert [len(batch) for batch in drawn] == sizes
        assert len(set(np.concatenate(drawn).tolist())) == sum(sizes)


# in clusters


def test_mixtures_and_blends_are_those_with_the_model_of_the_cluster(tmp_path):
    """Without a share of the own model, and with weights that stay at 1, both are FedAvg inside every cluster."""
    plain = fedclust({"steps": 2}, num_clusters=3)
    mixture = MixtureTraining(steps=2, alpha=0.0, adapt="never"), EnvelopeModel()
    blend = InitialisedTraining(steps=2, weight_lr=1e-30), ClusterReference()
    ends = [
        fit(
            blobs_module(), blobs(8), Method(*parts, plain.aggregation, plain.clustering), tmp_path / str(i), rounds=3
        ).state
        for i, parts in enumerate([(plain.local_update, plain.exchange), mixture, blend])
    ]
    assert ends[0].num_clusters == 3
    for state in ends[1:]:
        assert torch.equal(state.assignment, ends[0].assignment)
        torch.testing.assert_close(state.centres, ends[0].centres)


def test_a_blend_with_a_centre_is_the_personal_model_also_when_an_embedding_is_sent(tmp_path):
    """Nothing is pulled to the embedding, so what clients are tested with is the same."""
    one, other = (
        fit(blobs_module(), blobs(6), Method(fedala().local_update, sent, ClusterMean()), tmp_path / str(i), rounds=3)
        for i, sent in enumerate([ClusterReference(), CentreAndEmbedding()])
    )
    assert one.metrics["test/own_split/personal/loss"] == other.metrics["test/own_split/personal/loss"]


# FedAMP


def attentive(models, i, step, sigma):
    """Returns u_i by the paper's formula."""
    xi = [0.0 if j == i else step * np.exp(-((models[i] - w) ** 2).sum() / sigma) / sigma for j, w in enumerate(models)]
    xi = np.array(xi) / max(1.0, sum(xi))
    xi[i] = 1 - xi.sum()
    return xi @ np.stack(models)


@ENGINES
@pytest.mark.parametrize(("step", "sigma"), [(0.2, 0.5), (30.0, 2.0)])
def test_fedamp_pulls_to_attentive_means(tmp_path, engine, step, sigma):
    """The longer step gives the other model all the attention."""
    pull = 0.6
    module = linear_module(LR, cluster_weight=pull)
    watch = run(fedamp(step, sigma, steps=2), tmp_path, module, rounds=3, engine=engine, batch_size=2)
    own = [started(module), started(module)]
    for number, each in enumerate(watch.history):
        clouds, ends = [attentive(own, i, step, sigma) for i in (0, 1)], []
        for i in (0, 1):
            end = own[i]
            for rows in batches(i, 4 * number, 2):
                end = end - LR * (slope_of(end, rows) + pull * (end - clouds[i]))
            ends.append(end)
        own = ends
        close(each.global_model, np.mean(own, axis=0))
    for state, expected in zip(watch.state.clients.states([0, 1]), own, strict=True):
        close(state.model, expected)
    assert watch.rows[0]["comm/up_bytes"] == watch.rows[0]["comm/down_bytes"] == 4 * 2 * P
    assert step == 0.2 or np.abs(clouds[0] - ends[1]).max() < np.abs(clouds[0] - ends[0]).max()


def test_fedamp_pays_attention_to_clients_that_have_taken_part(tmp_path):
    watch = fit(blobs_module(), blobs(6), fedamp(1.0, 5.0, steps=2), tmp_path, rounds=3, clients_per_round=2)
    state, layout, exchange = watch.state, watch.server.layout, watch.server.method.exchange
    known = torch.nonzero(state.participated).flatten().tolist()
    assert 2 < len(known) < 6
    for client in range(6):
        models = [state.stored_model(client), *(state.stored_model(i) for i in known if i != client)]
        expected = attentive([model.double().numpy() for model in models], 0, 1.0, 5.0)
        close(exchange.down(state, client, layout).payload["centre"], expected)
        if client not in known:  # it would be sent this model
            close(exchange.personal(state, client, layout), expected)
            assert torch.equal(exchange.newcomer_model(state, client, layout), state.global_model)


def test_without_a_pull_fedamp_is_training_alone(tmp_path):
    one, other = (run(method, tmp_path / str(i), batch_size=2) for i, method in enumerate((fedamp(), alone())))
    for own, expected in zip(*(each.state.clients.states([0, 1]) for each in (one, other)), strict=True):
        assert torch.equal(own.model, expected.model)


def test_an_attentive_mean_has_the_buffers_of_the_own_model():
    own, other = torch.tensor([0.0, 0.0, 7.0]), torch.tensor([1.0, 0.0, 3.0])
    mean = attentive_mean(own, [other], step=1.0, sigma=2.0, num_parameters=2)
    torch.testing.assert_close(mean, torch.tensor([0.5 * np.exp(-0.5), 0.0, 7.0], dtype=torch.float32))
    assert torch.equal(attentive_mean(own, [1e9 * other], 1.0, 2.0, 2), own)  # too far away to count
    assert torch.equal(attentive_mean(own, [], 1.0, 2.0, 2), own)


# what is refused


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MixtureTraining(steps=1, alpha=1.5), "alpha=1.5; allowed are shares from 0 to 1"),
        (lambda: MixtureTraining(steps=1, adapt="often"), "adapt='often'; allowed are round, step and never"),
        (lambda: MixtureTraining(), "exactly one must be a number"),
        (lambda: Method(MixtureTraining(steps=1), FullModel(), GlobalMean()), "MixtureTraining needs the model that"),
        (lambda: Method(MixtureTraining(steps=1), ClusterReference(), GlobalMean()), "reads model from the downlink"),
        (lambda: Method(DittoTraining(steps=1), FullModel(), GlobalMean()), "DittoTraining needs the model that"),
        (lambda: InitialisedTraining(steps=1, layers=0), "layers=0; allowed are a number >= 1"),
        (lambda: InitialisedTraining(steps=1, share=0.0), "share=0.0"),
        (lambda: InitialisedTraining(steps=1, weight_lr=-1.0), "weight_lr=-1.0"),
        (lambda: InitialisedTraining(steps=1, most_passes=0), "most_passes=0; allowed are"),
        (lambda: InitialisedTraining(), "exactly one must be a number"),
        (lambda: Method(InitialisedTraining(steps=1), GlobalReference(), GlobalMean()), "clients keep none"),
        (lambda: Method(InitialisedTraining(steps=1), FullModel(), GlobalMean()), "reads centre from the downlink"),
        (lambda: AttentiveReference(step=0.0), "step=0.0, sigma=0.3; allowed are numbers above 0"),
        (
            lambda: Method(
                LocalTraining(steps=1),
                AttentiveReference(transforms=[GaussianNoise(clip=1.0, sigma=1.0, before="aggregation")]),
                GlobalMean(),
            ),
            "AttentiveReference merges stored models, which have none. Set before: upload.",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_layers_that_the_network_does_not_have_and_unknown_steps_are_refused(tmp_path):
    with pytest.raises(ValueError, match="InitialisedTraining: got 3 layers; the network has 2"):
        run(fedala(steps=1, layers=3), tmp_path)
    adam = FederatedModule(linear, partial(torch.optim.Adam, lr=LR))
    with pytest.raises(ValueError, match="MixtureTraining got the optimizer Adam"):
        run(apfl(steps=1), tmp_path, adam)
