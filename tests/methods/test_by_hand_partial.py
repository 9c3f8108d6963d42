"""Tests of FedRep and FedBABU against numpy, of FedBN against plain torch, and of networks that do not fit."""

from functools import partial

import numpy as np
import pytest
import torch

from lcfl.core import rng
from lcfl.methods import (
    AdaptedEmbedding,
    AdaptedModel,
    AlternatingTraining,
    ClusterMean,
    ClusterReference,
    FineTunedTraining,
    GlobalMean,
    LocalTraining,
    Method,
    NoExchange,
    OwnLayers,
    PartTraining,
    SharedEmbedding,
)
from lcfl.models import MLP
from lcfl.models.layout import Layout
from lcfl.models.module import FederatedModule
from tests.helpers.builders import (
    LogsNumber,
    NormedMLP,
    alone,
    blobs,
    blobs_module,
    fedavg,
    fedbabu,
    fedbn,
    fedper,
    fedrep,
    fit,
    linear,
    linear_module,
    loaded,
)
from tests.methods.clustering.test_one_shot import fedclust
from tests.methods.test_by_hand_baselines import (
    LR,
    SHARE,
    batches,
    close,
    loss_on_test,
    run,
    slope_of,
    started,
)

PHI, H = slice(0, 9), slice(9, 17)
ENGINES = ["sequential", "compiled", "stacked"]


def descended(w, rows_of_steps, part, momentum=0.0, decay=0.0, rate=LR):
    """Returns the model after steps on one part."""
    w, velocity = w.copy(), 0.0
    for rows in rows_of_steps:
        velocity = momentum * velocity + (slope_of(w, rows) + decay * w)[part]
        w[part] -= rate * velocity
    return w


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_fedrep_trains_the_head_and_then_the_embedding(tmp_path, engine, momentum):
    """Three steps of the head and two of the embedding, with batches of 2 and momentum that begins anew in each run."""
    optimizer = partial(torch.optim.SGD, lr=LR, momentum=momentum, weight_decay=0.1)
    module = FederatedModule(linear, optimizer)
    watch = run(fedrep(steps=2, head_steps=3), tmp_path, module, rounds=3, engine=engine, batch_size=2)
    phi, own = started(module)[PHI], [started(module), started(module)]
    for number, each in enumerate(watch.history):
        for i in (0, 1):
            rows, start = batches(i, 10 * number, 5), np.concatenate([phi, own[i][H]])
            own[i] = descended(descended(start, rows[:3], H, momentum, 0.1), rows[3:], PHI, momentum, 0.1)
        phi = np.mean([each[PHI] for each in own], axis=0)
        close(each.global_model[PHI], phi)
        assert torch.equal(each.global_model[H], watch.state.initial[H])
    for state, expected in zip(watch.state.clients.states([0, 1]), own, strict=True):
        close(state.model, expected)
        assert state.consumed == 3 * 10
    expected = loss_on_test([np.concatenate([phi, each[H]]) for each in own])
    assert watch.metrics["test/own_split/personal/loss"] == pytest.approx(expected, rel=1e-5)
    assert watch.rows[0]["comm/up_bytes"] == watch.rows[0]["comm/down_bytes"] == 2 * 4 * 9


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tuned", ["all", "head"])
def test_fedbabu_never_trains_the_head_and_fine_tunes_before_the_test(tmp_path, engine, tuned):
    """The learning rate of an evaluation is that of the round after the last one."""
    optimizer = partial(torch.optim.SGD, lr=LR, momentum=0.5, weight_decay=0.1)
    module = FederatedModule(linear, optimizer)
    method = fedbabu(steps=2, lr_decay=0.9, fine_tuned=tuned, fine_tuning_steps=3)
    watch = run(method, tmp_path, module, rounds=3, engine=engine, batch_size=2)
    w = started(module)
    for number, each in enumerate(watch.history):
        rate = LR * 0.9**number
        ends = [descended(w, batches(i, 4 * number, 2), PHI, 0.5, 0.1, rate) for i in (0, 1)]
        w = SHARE @ ends
        close(each.global_model, w)
        assert torch.equal(each.global_model[H], watch.state.initial[H])
    for state, end in zip(watch.state.clients.states([0, 1]), ends, strict=True):
        close(state.model, end)
        assert torch.equal(state.model[H], watch.state.initial[H])
    part = {"all": slice(0, 17), "head": H}[tuned]
    personal = [descended(w, batches(i, 4 * 3, 3), part, 0.5, 0.1, LR * 0.9**3) for i in (0, 1)]
    for kind, models in (("personal", personal), ("global", [w, w])):
        expected = loss_on_test(models)
        assert watch.metrics[f"test/own_split/{kind}/loss"] == pytest.approx(expected, rel=1e-5)
    assert watch.rows[0]["comm/up_bytes"] == watch.rows[0]["comm/down_bytes"] == 2 * 4 * 9


def norms_of(network):
    """Returns the names in the state dict of the batch normalisations."""
    layers = {name for name, layer in network.named_modules() if isinstance(layer, torch.nn.BatchNorm1d)}
    return {name for name in network.state_dict() if name.rpartition(".")[0] in layers}


@pytest.mark.parametrize("engine", ENGINES)
def test_fedbn_merges_all_layers_but_batch_normalisation(tmp_path, engine):
    network = partial(MLP, 16, [6, 5], 8, batch_norm=True)
    module = FederatedModule(network, partial(torch.optim.SGD, lr=0.1, momentum=0.5))
    data = loaded(blobs(4, batch_size=7, drop_last=True))
    watch = fit(module, data, fedbn(steps=3), tmp_path, rounds=3, engine=engine)
    norms = norms_of(module.network)
    assert len(norms) == 2 * 5
    states = [module.fill(network(), watch.state.initial).state_dict() for _ in range(4)]
    for number in range(3):
        for client, own in enumerate(states):
            states[client] = trained(network, own, data, client, number)
        shared = {name: torch.stack([own[name] for own in states]).mean(dim=0) for name in set(states[0]) - norms}
        states = [{**own, **shared} for own in states]
    for client, expected in enumerate(states):
        model = watch.server.method.exchange.personal(watch.state, client, watch.server.layout)
        actual = module.fill(network(), model).state_dict()
        for name in expected:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-3, atol=1e-5)
    assert any(not torch.allclose(states[0][name], states[1][name]) for name in norms if name.endswith("weight"))
    size = module.layout.num_parameters - 2 * (6 + 5)
    assert watch.rows[-1]["comm/up_bytes"] == watch.rows[-1]["comm/down_bytes"] == 4 * 4 * size


def trained(network, state, data, client, number):
    """Returns the state dict after three batches of a client's order."""
    own, indices = network().train(), data.population.train[client]
    own.load_state_dict(state)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.5)
    per_pass = len(indices) // 7
    for step in range(3 * number, 3 * number + 3):
        order = rng.generator(0, "order", client, step // per_pass).permutation(len(indices))
        begin = step % per_pass * 7
        inputs, targets = data.samples.training_batch(indices[order[begin : begin + 7]], torch.device("cpu"))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(own(inputs), targets).backward()
        optimizer.step()
    return {name: each.clone() for name, each in own.state_dict().items()}


def test_training_of_all_parts_is_that_of_fedavg(tmp_path):
    """Fine-tuning is for the test and leaves the federation as it is."""
    method = Method(FineTunedTraining(steps=3, fine_tuning_steps=1), AdaptedModel(), GlobalMean())
    one = fit(blobs_module(), blobs(4), method, tmp_path / "one", rounds=2)
    other = fit(blobs_module(), blobs(4), fedavg(), tmp_path / "other", rounds=2)
    assert torch.equal(one.state.global_model, other.state.global_model)


@pytest.mark.parametrize("start", ["own", "centre"])
def test_fine_tuning_has_the_start_of_the_training(tmp_path, start):
    """Heads fine-tuned at a rate of almost 0 stay those of the start, the client's own model or that of its cluster."""
    tuned = FineTunedTraining(steps=3, start=start, fine_tuned="head", fine_tuning_steps=2, lr_decay=1e-9)
    method = Method(tuned, ClusterReference(), ClusterMean())
    watch = fit(blobs_module(), blobs(4), method, tmp_path, rounds=1)
    personal, cluster = (watch.metrics[f"test/own_split/{kind}/loss"] for kind in ("personal", "cluster"))
    assert (personal == pytest.approx(cluster, rel=1e-5)) == (start == "centre")


def test_fedbn_that_keeps_every_layer_is_training_alone(tmp_path):
    with pytest.warns(UserWarning, match="OwnLayers shares no layer, so every client trains alone"):
        one = fit(blobs_module(), blobs(4), fedbn(["embedding", "decision"]), tmp_path / "one", rounds=3)
    other = fit(blobs_module(), blobs(4), alone(), tmp_path / "other", rounds=3)
    for client in range(4):
        assert torch.equal(one.state.clients[client].model, other.state.clients[client].model)


def test_the_layers_of_fedbn_may_be_given_by_pattern():
    layout = Layout.from_network(NormedMLP())  # 16 x 8 + 8, then 16 of the normalisation
    assert OwnLayers().subset(layout) == OwnLayers(["*.1"]).subset(layout)
    assert OwnLayers(["decision"]).subset(layout).slices == (slice(0, 152), slice(224, 241))
    assert OwnLayers().subset(layout).slices == (slice(0, 136), slice(152, 224))


def test_fedrep_with_few_clients_leaves_the_heads_of_the_others_alone(tmp_path):
    watch = fit(blobs_module(), blobs(6), fedrep(), tmp_path, rounds=2, clients_per_round=1)
    layout, state = watch.server.layout, watch.state
    for client in range(6):
        personal = watch.server.method.exchange.personal(state, client, layout)
        assert torch.equal(layout.embedding_of(personal), layout.embedding_of(state.global_model))
        own = torch.equal(personal[layout.num_embedding :], state.initial[layout.num_embedding :])
        assert own != bool(state.participated[client])


def test_work_is_counted_in_both_runs():
    update = AlternatingTraining(steps=2, head_epochs=3, fill_batch=False)
    assert update.cost(20, 8) == 3 * 20 + 2 * 8
    assert AlternatingTraining(epochs=1, head_steps=4, fill_batch=True).cost(20, 8) == 4 * 8 + 20
    assert FineTunedTraining(epochs=2, fine_tuning_steps=7).cost(20, 8) == 40


def test_two_runs_log_and_count_the_steps_of_both(tmp_path):
    module = LogsNumber(linear, partial(torch.optim.SGD, lr=LR))
    watch = run(fedrep(steps=3, head_steps=5), tmp_path, module, rounds=1, engine="sequential")
    assert watch.rows[0]["number"] == pytest.approx(1.0)  # of the embedding's three steps


NO_HEAD = partial(FederatedModule, linear, cut=None)
SMALL = {"steps": 1}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AlternatingTraining(**SMALL), "got head_steps=None, head_epochs=None; exactly one must be a number"),
        (lambda: AlternatingTraining(**SMALL, head_steps=0), "got head_steps=0, head_epochs=None; exactly one must"),
        (lambda: AlternatingTraining(head_steps=1), "method.local_update: got steps=None, epochs=None; exactly one"),
        (lambda: FineTunedTraining(**SMALL), "got fine_tuning_steps=None, fine_tuning_epochs=None; exactly one must"),
        (lambda: FineTunedTraining(**SMALL, fine_tuning_steps=10**7), "got fine_tuning_steps=10000000.* at most 10000"),
        (lambda: PartTraining(**SMALL, part="body"), "got part='body'; allowed are all, embedding and head"),
        (lambda: FineTunedTraining(**SMALL, fine_tuning_steps=1, fine_tuned="x"), "got fine_tuned='x'; allowed are"),
        (
            lambda: Method(LocalTraining(**SMALL), AdaptedEmbedding(), GlobalMean()),
            "AdaptedEmbedding needs a local update with an adaptation, e.g. .* LocalTraining has none",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.filterwarnings("ignore:method.exchange. SharedEmbedding shares")
@pytest.mark.filterwarnings("ignore:method.exchange. AdaptedEmbedding shares")
@pytest.mark.parametrize(
    ("method", "module", "words"),
    [
        (fedrep, NO_HEAD, "AlternatingTraining trains the decision head, which has none of the 17 trained parameters"),
        (fedbabu, partial(blobs_module, cut="embedding.fc1"), "FineTunedTraining trains the embedding, which has none"),
        (partial(fedbabu, fine_tuned="head"), NO_HEAD, "FineTunedTraining trains the decision head, which has none"),
        (partial(fedbabu, part="head"), NO_HEAD, "FineTunedTraining trains the decision head, which has none"),
        (
            lambda: Method(PartTraining(**SMALL, part="head"), NoExchange(), alone().aggregation),
            NO_HEAD,
            "PartTraining trains the decision head",
        ),
        (
            fedbn,
            linear_module,
            "OwnLayers: the models have no layer with running statistics.*batch_norm=true for",
        ),
        (
            fedbn,
            partial(FederatedModule, NormedMLP, buffer_policy="local"),
            "OwnLayers: the models have no layer with running statistics.*set model.buffer_policy=average",
        ),
        (
            partial(fedbn, ["norm"]),
            linear_module,
            "OwnLayers: the trained part of the network has no layer or parameter 'norm'; its layers are",
        ),
        (partial(fedbn, "norm"), linear_module, r"OwnLayers: got the text 'norm'; it must be a list of patterns"),
    ],
)
@pytest.mark.filterwarnings("ignore:model.cut")
def test_a_network_that_does_not_fit_is_refused_before_data_is_loaded(tmp_path, method, module, words):
    with pytest.raises(ValueError, match=words):
        fit(module(), blobs(4), method(), tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_part_may_be_trained_with_any_exchange(tmp_path):
    method = Method(PartTraining(steps=3, part="head"), SharedEmbedding(), GlobalMean())
    watch = fit(blobs_module(), blobs(4), method, tmp_path, rounds=2)
    assert torch.equal(watch.state.global_model, watch.state.initial)
    plain = fit(blobs_module(), blobs(4), fedper(), tmp_path / "plain", rounds=2)
    assert not torch.equal(plain.state.global_model, plain.state.initial)


@pytest.mark.parametrize("method", [fedrep(), fedbabu(), fedbn()], ids=["fedrep", "fedbabu", "fedbn"])
def test_every_cluster_has_its_own_shared_part(tmp_path, method):
    mean = ClusterMean("participants", "participants")
    method = Method(method.local_update, method.exchange, mean, fedclust().clustering)
    module = FederatedModule(NormedMLP, partial(torch.optim.SGD, lr=0.05))
    watch = fit(module, blobs(8, drop_last=True), method, tmp_path, rounds=3, final_models=None)
    state, layout = watch.state, watch.server.layout
    assert state.num_clusters > 1
    place = method.exchange.subset(layout)
    shared = torch.stack([place.take(method.exchange.personal(state, client, layout)) for client in range(8)])
    alike = (shared[:, None] == shared).all(dim=2)
    assert torch.equal(alike, state.assignment[:, None] == state.assignment)
