"""The stacked engine gives each of several clients the same result as the sequential engine."""

import gc
import itertools
import random
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lcfl.data.augmentation import CropAndFlip
from lcfl.data.spec import SampleSpec
from lcfl.engines.stacked import _bytes_for_clients, check_stacked
from lcfl.models import CNN, MLP
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import NO_PULLS, Pulls
from tests.engines.networks import NETWORKS, SHAPE, Counting, Frozen, Inner, Normal, Plain, Replacing, Watching
from tests.engines.pairs import (
    SIZES,
    TOLERANCE,
    Logging,
    LoggingScores,
    assert_only_this_client_diverges,
    assert_same_runs,
    assert_same_training,
    batches_of,
    both,
    data_of,
    model_of,
    near,
    stacked_pair,
    train,
)
from tests.helpers.builders import named_engine


@pytest.mark.parametrize("name", NETWORKS)
def test_runs_of_unequal_clients_with_every_network(name):
    network, shape = NETWORKS[name]
    pair = stacked_pair(network, shape, partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    assert_same_training(pair, rtol=1e-3, atol=1e-4)
    has_batch_norm = any(isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d) for each in network().modules())
    assert (pair[1].batches.ignored is None) == has_batch_norm


SGD = partial(torch.optim.SGD, lr=0.1)


def without_decay_of_biases(parameters):
    """Distinguishes them by actual_loss dimensions, as usual."""
    matrices, vectors = [], []
    for each in parameters:
        (matrices if each.ndim > 1 else vectors).append(each)
    groups = [{"params": matrices, "weight_decay": 2.0}, {"params": vectors, "lr": 0.002, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


OPTIMIZERS = [
    partial(SGD, weight_decay=0.01),
    partial(SGD, momentum=0.9, dampening=0.5, weight_decay=0.01),
    partial(SGD, momentum=0.9, nesterov=True),
    partial(torch.optim.Adam, lr=0.01),
    partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    partial(torch.optim.RMSprop, lr=0.01),
    partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.5),
    without_decay_of_biases,
]


@pytest.mark.parametrize(
    ("pulls", "optimizer"),
    [*((pulls, SGD) for pulls in ("centre", "embedding")), *(("all", each) for each in OPTIMIZERS)],
)
def test_run_with_all_optimizers_and_pulls(optimizer, pulls):
    pair = stacked_pair(Inner, (7,), optimizer, cluster_weight=0.5, global_weight=0.3)

    def task(client, engine):
        model = model_of(engine, client)
        centre = near(model, 7) if pulls in ("centre", "all") else None
        embedding = near(model, 8)[: engine.layout.num_embedding] if pulls in ("embedding", "all") else None
        correction = near(model, 9)[: engine.layout.num_parameters] if pulls == "all" and client else None
        targets = Pulls(centre, embedding, correction)
        scale = 0.5 if client < 3 else 1.0  # one client has a different learning rate
        return engine.run_optimizer(model, batches_of(client, SIZES[client]), targets, rate_scale=scale)

    assert_same_runs(*both(pair, task), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parts_of_the_model_are_trained_side_by_side(optimizer):
    pair = stacked_pair(Inner, (7,), optimizer)

    def task(client, engine):
        model, part = model_of(engine, client), ("embedding", "head", "all", "head")[client]
        run = engine.run_optimizer(model, batches_of(client, SIZES[client]), part=part)
        trained = engine.layout.range_of(part)
        assert torch.equal(run.model[: trained.start], model[: trained.start])
        end = engine.layout.num_parameters
        assert torch.equal(run.model[trained.stop : end], model[trained.stop : end])
        return run

    assert_same_runs(*both(pair, task), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("policy", ["average", "keep_server", "local"])
def test_buffers_follow_the_policy(policy):
    pair = stacked_pair(Normal, SHAPE, buffer_policy=policy)
    runs = both(
        pair, lambda i, engine: engine.run_optimizer(model_of(engine, i), batches_of(i, (9, 5, 9)[i:])), range(3)
    )
    assert_same_runs(*runs)
    slopes = both(pair, lambda i, engine: engine.gradient(model_of(engine, i), batches_of(i, [9])[0]), range(3))
    for (one, kept), (other, own) in zip(*slopes, strict=True):
        torch.testing.assert_close(other.buffers, one.buffers, **TOLERANCE)
        assert kept is own is None or torch.allclose(kept, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "pulled"),
    [("plain", True), ("normal", True), ("logistic regression", True), ("logistic regression", False)],
)
def test_gradients_and_their_other_outputs(name, pulled):
    network, shape = NETWORKS[name]
    pair = stacked_pair(network, shape, cluster_weight=0.5, global_weight=0.3)

    def task(client, engine):
        model = model_of(engine, client)
        layout = engine.layout
        centre, embedding, correction = (near(model, seed) for seed in (7, 8, 9))
        targets = Pulls(centre, embedding[: layout.num_embedding], correction[: layout.num_parameters])
        targets = targets if pulled else NO_PULLS
        first = engine.gradient(model, batches_of(client, [5 + 3 * (client % 2)])[0], 0, targets)
        return engine.gradient(first.step_from(model, 0.1), batches_of(client, [12])[0], 1, targets)

    for (one, _), (other, _) in zip(*both(pair, task), strict=True):
        scale = float(one.vector.abs().max())
        torch.testing.assert_close(other.vector / scale, one.vector / scale, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(other.loss, one.loss, **TOLERANCE)
        torch.testing.assert_close(other.buffers, one.buffers, **TOLERANCE)


def test_hessian_products():
    pair = stacked_pair(Inner, (7,))

    def task(client, engine):
        model = model_of(engine, client)
        return engine.hessian_vector_product(
            model, batches_of(client, [9])[0], near(torch.zeros(len(model)), client), 2
        )

    for (one, _), (other, _) in zip(*both(pair, task), strict=True):
        torch.testing.assert_close(other.vector, one.vector, **TOLERANCE)


@pytest.mark.parametrize(("name", "shared"), [("normal", True), ("LeNet5", False)])
def test_scores_and_losses(name, shared, monkeypatch):
    monkeypatch.setattr("lcfl.engines.stacked.SCORED_BATCH", 50)
    network, shape = NETWORKS[name]
    pair = stacked_pair(network, shape)

    def task(client, engine):
        indices = np.arange(75) if shared else np.arange(client, 20 + 40 * client)
        model = model_of(engine, client)
        return engine.scores(model, engine.samples, indices), engine.loss(model, indices)

    for (((one, labels), loss), _), (((other, own), actual_loss), _) in zip(*both(pair, task), strict=True):
        torch.testing.assert_close(other, one, **TOLERANCE)
        assert torch.equal(own, labels)
        assert actual_loss == pytest.approx(loss, rel=1e-5)


def test_clients_with_different_tasks_do_not_affect_each_other():
    pair = stacked_pair(Inner, (7,))

    def task(client, engine):
        model = model_of(engine, client)
        if client == 0:
            return engine.loss(model, np.arange(30))
        if client == 1:
            return float(engine.pixels(np.arange(3))[0].sum())
        for number in range(client):
            model = engine.gradient(model, batches_of(client, [8])[0], number).step_from(model, 0.1)
        return float(model.sum())

    expected, actual = ([found for found, _ in each] for each in both(pair, task))
    assert actual == pytest.approx(expected)


def test_every_client_has_its_own_random_draws():
    """Covers augmentation before and between requests, and other draws from the global generators."""
    data = data_of((1, 8, 8))
    data.samples.augmentation = CropAndFlip(2)
    pair = stacked_pair(partial(CNN, 1, 8, 4, channels=(2,), hidden=()), (1, 8, 8), data=data)

    def task(client, engine):
        model = model_of(engine, client)
        first = engine.run_optimizer(model, batches_of(client, [4, 3])).model
        drawn = torch.rand(1).item(), np.random.random(), random.random()
        slope = engine.gradient(first, batches_of(client, [4])[0])
        return torch.cat([slope.vector, torch.tensor([*drawn, torch.rand(1).item(), random.random()])])

    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate()
    expected, actual = both(pair, task)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    for (one, _), (other, _) in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, **TOLERANCE)
        assert torch.equal(other[-5:], one[-5:])


def test_a_custom_training_step_is_used_and_its_values_are_logged():
    pair = stacked_pair(Inner, (7,), kind=Logging)
    check_stacked(pair[0].module, SampleSpec((7,)))
    assert pair[1].batches.ignored is None, "the share of hits would count the padding"
    runs = both(pair, train)
    assert_same_runs(*runs)
    assert [set(run.logged) for run, _ in runs[1]] == [{"hits", "second"}] * 2 + [{"hits"}, {"hits", "second"}]


def test_an_exception_reaches_the_client_that_causes_it():
    pair = stacked_pair(Normal, SHAPE)

    def task(client, engine):
        try:
            return engine.run_optimizer(model_of(engine, client), batches_of(client, [6, 1 if client == 2 else 6])).loss
        except ValueError as error:
            return str(error)

    expected, actual = ([found for found, _ in each] for each in both(pair, task))
    assert actual[2] == expected[2] and "more than 1 value per channel" in actual[2]
    assert actual[:2] + actual[3:] == pytest.approx(expected[:2] + expected[3:], rel=1e-4)


def test_a_client_that_diverges_does_not_affect_the_others():
    assert_only_this_client_diverges(stacked_pair(Plain, SHAPE, partial(torch.optim.SGD, lr=0.05, momentum=0.9)), 1)


def test_arguments_are_not_changed_and_results_own_their_memory():
    _, engine = stacked_pair(Normal, SHAPE, buffer_policy="local", cluster_weight=1.0)
    model, buffers = engine.module.initial_model(3), engine.module.initial_buffers(3)
    copies, centre, weights = (model.clone(), buffers.clone()), near(model), engine.layout.pack(engine.module.network)

    def task(client, client_engine):
        client_engine.buffers = buffers
        end = client_engine.run_optimizer(model, batches_of(client, [12, 8]), Pulls(centre)).model
        return end, client_engine.buffers

    found = engine.run_all([partial(task, client) for client in range(3)])
    assert torch.equal(model, copies[0]) and torch.equal(buffers, copies[1]) and torch.equal(centre, near(model))
    assert torch.equal(engine.layout.pack(engine.module.network), weights)
    for tensor in itertools.chain(*found):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_no_model_outlives_a_run_until_the_next_garbage_collection():
    engine, seen = stacked_pair(Inner, (7,))[1], []

    def task(client, engine):
        model = model_of(engine, client)
        seen.append(weakref.ref(model))
        result = engine.run_optimizer(model, batches_of(client, SIZES[client]))
        seen.append(weakref.ref(result.model))
        return result.loss

    gc.collect()
    gc.disable()
    try:
        engine.run_all([partial(task, client) for client in range(4)])
        assert len(seen) == 8 and [each for each in seen if each() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("budget", [1, 10**9])
def test_a_budget_limits_the_clients_that_train_at_once(budget):
    pair = stacked_pair(partial(MLP, 7, (50,), 4), (7,), budget=budget)
    seen, training = [], set()

    def task(client, engine):
        training.add(client)
        seen.append(len(training))
        found = train(client, engine)
        training.remove(client)
        return found

    assert_same_runs(*both(pair, task))
    assert max(seen) == (1 if budget == 1 else 4)
    assert pair[1].most_clients == (1 if budget == 1 else 256)


def test_the_budget_allows_fewer_clients_with_larger_models():
    few, many = (stacked_pair(partial(MLP, 7, (width,), 4), (7,), budget=10**7)[1].most_clients for width in (500, 50))
    assert few < many < 256


def test_max_steps_cuts_a_run():
    pair = stacked_pair(Inner, (7,))
    for engine in pair:
        engine.max_steps = 1
    assert_same_training(pair)


@pytest.mark.parametrize("name", [pytest.param("LeNet5", marks=pytest.mark.slow), "MLP"])
def test_bf16_differs_from_the_sequential_engine_no_more_than_that_differs_from_float32(name):
    network, shape = NETWORKS[name]
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    pair = stacked_pair(network, shape, optimizer, precision="bf16-mixed")
    check_stacked(pair[0].module, SampleSpec(shape), "bf16-mixed")

    narrow, stacked = ([run for run, _ in runs] for runs in both(pair, train))
    wide = [run for run, _ in both(stacked_pair(network, shape, optimizer), train)[0]]
    for one, other, exact in zip(narrow, stacked, wide, strict=True):
        assert 0 < (other.model - one.model).norm() < 1.5 * (one.model - exact.model).norm()
        assert other.loss == pytest.approx(exact.loss, rel=2e-2)


@pytest.mark.parametrize(
    ("kind", "network", "ignores_padding"),
    [
        (FederatedModule, Frozen, True),
        (FederatedModule, Counting, True),
        (FederatedModule, Watching, False),
        (FederatedModule, Replacing, False),
        (LoggingScores, Inner, False),
    ],
)
def test_buffers_logged_values_and_parameters_that_are_not_trained(kind, network, ignores_padding):
    """Batches are padded only if the padding does not change a buffer or a logged value."""
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    pair = stacked_pair(network, (7,), optimizer, kind)
    assert (pair[1].batches.ignored is not None) == ignores_padding
    assert_same_training(pair)


def test_a_run_without_a_batch_is_refused_and_the_others_go_on():
    def task(client, engine):
        try:
            return engine.run_optimizer(model_of(engine, client), batches_of(client, [6] * (client != 2))).loss
        except ValueError as error:
            return str(error)

    data = data_of((7,))
    compiled = named_engine("compiled", FederatedModule(Inner), data)
    engines = *stacked_pair(Inner, (7,), partial(torch.optim.SGD, lr=0.01), data=data), compiled
    expected, *others = ([found for found, _ in each] for each in both(engines, task))
    refused = [each.pop(2) for each in (expected, *others)]
    assert refused == ["run_optimizer: got no batch; a local run takes at least one step."] * 3
    for actual in others:
        assert actual == pytest.approx(expected, rel=1e-4)


def test_a_trial_changes_nothing():
    module = FederatedModule(Normal)
    before, state = module.layout.pack(module.network), torch.get_rng_state()
    check_stacked(module, SampleSpec(SHAPE))
    assert torch.equal(module.layout.pack(module.network), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_integer_inputs():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(20, 6)
            self.decision = nn.Linear(6, 4)

        def forward(self, x):
            return self.decision(self.words(x).mean(dim=1))

    check_stacked(FederatedModule(Bag), SampleSpec((5,), torch.int64))
    assert_same_training(stacked_pair(Bag, (5,), data=data_of((5,), words=20)))


@pytest.mark.parametrize(("ranks", "share"), [(None, 1), ([0, 1], 1), ([0, 0], 2), ([0, 1, 0, 0], 3)])
def test_ranks_on_the_same_gpu_share_half_of_its_memory(monkeypatch, ranks, share):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=12 * 2**30))
    devices = ranks and [torch.device("cuda", number) for number in ranks]
    fabric = SimpleNamespace(
        device=torch.device("cuda", 0), strategy=SimpleNamespace(**({"parallel_devices": devices} if ranks else {}))
    )
    assert _bytes_for_clients(fabric) == 6 * 2**30 // share
