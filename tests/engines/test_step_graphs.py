"""Steps that the stacked engine replays give each client the same result as the sequential engine, with few recordings.

CUDA graphs need a GPU. Here a replay calls the recorded function again and copies its results to where the first call
wrote them.
"""

from functools import partial

import pytest
import torch
from torch import nn

from lcfl.engines import step_graphs
from lcfl.engines.step_graphs import StepGraphs, is_recordable, stack_size
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import Pulls
from tests.engines.networks import NETWORKS, Counting, Frozen, Inner, Plain
from tests.engines.pairs import (
    SIZES,
    LoggingScores,
    assert_only_this_client_diverges,
    assert_same_training,
    batches_of,
    both,
    model_of,
    near,
    stacked_pair,
)


def simulated(function, pool):
    """Records a function without a GPU."""
    function()
    slopes, output = function()
    places = [*slopes.values(), output.losses, *output.logged.values(), *output.buffers.values()]

    def replay():
        again, other = function()
        values = [*again.values(), other.losses, *other.logged.values(), *other.buffers.values()]
        for place, value in zip(places, values, strict=True):
            place.detach().copy_(value.detach())

    return replay, (slopes, output)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    monkeypatch.setattr(step_graphs, "record", simulated)


def pair_of(*arguments, **options):
    """Makes a sequential engine and a stacked one that replays its steps."""
    sequential, stacked = stacked_pair(*arguments, **options)
    stacked._graphs = StepGraphs()
    return sequential, stacked


def recorded(engine):
    """Returns number of clients, size of batches and untrained parameters of all recordings."""
    return sorted((clients, targets[0], untrained) for clients, targets, _, untrained in engine._graphs._recordings)


@pytest.mark.parametrize("name", ["plain", "logistic regression", "LeNet5"])
def test_runs_of_unequal_clients(name):
    network, shape = NETWORKS[name]
    pair = pair_of(network, shape, partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    assert_same_training(pair, rtol=1e-3, atol=1e-4)
    assert recorded(pair[1]) == [(clients, 32, ()) for clients in (1, 2, 3, 4)]


def test_with_batch_normalisation_only_batches_of_the_usual_size_are_recorded():
    pair = pair_of(*NETWORKS["normal"], partial(torch.optim.SGD, lr=0.05))
    assert_same_training(pair, rtol=1e-3, atol=1e-4)
    assert {size for _, size, _ in recorded(pair[1])} == {32}


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [(partial(torch.optim.SGD, lr=0.1), "bf16-mixed"), (partial(torch.optim.Adam, lr=0.01), "32-true")],
)
def test_clients_with_and_without_pulls(optimizer, precision):
    pair = pair_of(Inner, (7,), optimizer, cluster_weight=0.5, global_weight=0.3, precision=precision)

    def task(client, engine):
        model = model_of(engine, client)
        centre = near(model, 7) if client != 1 else None
        embedding = near(model, 8)[: engine.layout.num_embedding] if client != 2 else None
        correction = near(model, 9)[: engine.layout.num_parameters] if client != 3 else None
        return engine.run_optimizer(model, batches_of(client, SIZES[client]), Pulls(centre, embedding, correction))

    tolerance = {"rtol": 1e-3, "atol": 1e-4} if precision == "32-true" else {"rtol": 0.05, "atol": 0.01}
    expected, actual = both(pair, task)
    for (one, _), (other, _) in zip(expected, actual, strict=True):
        torch.testing.assert_close(other.model, one.model, **tolerance)


def test_a_part_of_the_model_has_a_recording_of_its_own():
    pair = pair_of(Inner, (7,), partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1))

    def task(part, client, engine):
        return engine.run_optimizer(model_of(engine, client), batches_of(client, SIZES[client]), part=part)

    for part in ("embedding", "head"):
        expected, actual = both(pair, partial(task, part))
        rest = torch.ones(pair[0].layout.num_parameters, dtype=torch.bool)
        rest[pair[0].layout.range_of(part)] = False
        for client, ((one, _), (other, _)) in enumerate(zip(expected, actual, strict=True)):
            torch.testing.assert_close(other.model, one.model, rtol=1e-3, atol=1e-4)
            assert torch.equal(other.model[rest], model_of(pair[1], client)[rest])
    assert len({untrained for *_, untrained in recorded(pair[1])}) == 2


def test_gradients_of_batches_up_to_the_usual_size():
    pair = pair_of(Inner, (7,))

    def task(size, client, engine):
        return engine.gradient(model_of(engine, client), batches_of(client, [size - client])[0])

    for size in (32, 48):
        expected, actual = both(pair, partial(task, size))
        for (one, _), (other, _) in zip(expected, actual, strict=True):
            torch.testing.assert_close(other.vector, one.vector, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(other.loss, one.loss, rtol=1e-4, atol=1e-5)
    assert recorded(pair[1]) == [(4, 32, ())]


def test_results_are_not_overwritten():
    """Each client's result has its own memory, and rows that an earlier step left behind change nothing."""
    pair = pair_of(Inner, (7,))
    sizes = [(32,), (9, 9), (9, 9), (32, 32, 5), *[(4, 6, 1)] * 6]

    def task(client, engine):
        return engine.run_optimizer(model_of(engine, client), batches_of(client, sizes[client]))

    _, first = both(pair, task, range(10))
    _, fewer = both(pair, task, range(9))
    _, again = both(pair, task, range(10))
    assert [clients for clients, *_ in recorded(pair[1])] == [6, 7, 8, 10]
    for (one, _), (other, _) in zip([*first, *first], [*again, *fewer], strict=False):
        assert torch.equal(one.model, other.model)


def test_values_that_the_forward_pass_logs():
    assert_same_training(pair_of(Plain, NETWORKS["plain"][1], kind=LoggingScores), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("network", [Counting, Frozen])
def test_buffers_and_parameters_that_are_not_trained(network):
    """They are right also in the first step of a recording, which runs the step twice before."""
    pair = pair_of(network, (7,), partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1))
    assert_same_training(pair)
    assert recorded(pair[1])


@pytest.mark.parametrize(
    "loss",
    [
        partial(nn.CrossEntropyLoss, label_smoothing=0.2),
        partial(nn.CrossEntropyLoss, weight=torch.tensor([1.0, 2.0, 0.5, 3.0])),
        partial(nn.CrossEntropyLoss, ignore_index=3),
    ],
)
def test_cross_entropy_with_settings(loss):
    pair = pair_of(Inner, (7,), loss=loss())
    assert_same_training(pair, range(2))
    assert recorded(pair[1])


def test_a_client_that_diverges_does_not_affect_the_others():
    assert_only_this_client_diverges(pair_of(Inner, (7,), partial(torch.optim.SGD, lr=0.05, momentum=0.9)), 3)


def test_a_step_that_cannot_be_recorded_starts_its_kernels_one_by_one(monkeypatch, caplog):
    def fails(function, pool):
        calls.append(function)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(step_graphs, "record", fails)
    calls, pair = [], pair_of(Inner, (7,))
    with caplog.at_level("WARNING"):
        assert_same_training(pair)
    assert not recorded(pair[1]) and len(calls) == 1
    assert caplog.text.count("its step cannot be recorded as a CUDA graph: operation not permitted when") == 1
    assert "and more" not in caplog.text


def test_recordings_for_fewer_clients_read_the_same_memory():
    pair = pair_of(Inner, (7,), partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    assert_same_training(pair)
    places = {each.arguments[0].data_ptr() for each in pair[1]._graphs._recordings.values()}
    assert len(pair[1]._graphs._recordings) == 4 and len(places) == 1


@pytest.mark.parametrize("name", ["training_step", "forward", "regularizer"])
def test_modules_with_methods_of_their_own_are_not_recorded(name):
    own = type("Own", (FederatedModule,), {name: lambda self, *arguments: None})
    assert is_recordable(FederatedModule(Inner)) and not is_recordable(own(Inner))


def test_sizes_of_stacks():
    assert [stack_size(count) for count in range(1, 18)] == [*range(1, 9), 10, 10, 12, 12, 14, 14, 16, 16, 20]
    assert stack_size(25) == 28 and stack_size(100) == 112 and stack_size(256) == 256
