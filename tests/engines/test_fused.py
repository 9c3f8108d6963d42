"""The fused engine gives each client the same result as the sequential engine, with few programs."""

from functools import partial

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lcfl.data.spec import SampleSpec
from lcfl.engines import FusedEngine, choose_engine, make_engine
from lcfl.engines.fused import check_fused
from lcfl.engines.tracing import Unsupported
from lcfl.models.module import FederatedModule, Pulls
from tests.engines.networks import NETWORKS, SHAPE, Counting, Frozen, Inner, Normal, Plain, Watching
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
    model_of,
    near,
    stacked_pair,
)
from tests.engines.test_methods import assert_agree
from tests.helpers.builders import blobs, blobs_module, loaded
from tests.helpers.fits import fit


@pytest.fixture(autouse=True)
def compiled_where_slow(request):
    """Compiles only in slow tests."""
    if request.node.get_closest_marker("slow") is None:
        request.getfixturevalue("not_compiled")


def pair_of(*arguments, batch_size=32, budget=None, **options):
    """Makes a sequential and a fused engine."""
    sequential, stacked = stacked_pair(*arguments, **options)
    spec = SampleSpec(arguments[1])
    fused = FusedEngine(sequential.fabric, stacked.module, stacked.samples, spec, batch_size, budget=budget)
    return sequential, fused


def assert_same_gradients(expected, actual):
    for (one, _), (other, _) in zip(expected, actual, strict=True):
        torch.testing.assert_close(other.vector, one.vector, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(other.loss, one.loss, **TOLERANCE)


@pytest.mark.parametrize("name", ["plain", "logistic regression"])
def test_runs_of_unequal_clients(name):
    network, shape = NETWORKS[name]
    pair = pair_of(network, shape, partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    assert_same_training(pair, rtol=1e-3, atol=1e-4)


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


def test_a_part_of_the_model_has_a_program_of_its_own():
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
    assert len({untrained for *_, untrained in pair[1]._programs}) == 2


def test_gradients_of_batches_with_and_without_a_program():
    pair = pair_of(Inner, (7,), batch_size=8)

    def task(size, client, engine):
        return engine.gradient(model_of(engine, client), batches_of(client, [size - client])[0])

    for size in (8, 12):
        assert_same_gradients(*both(pair, partial(task, size)))
    assert list(pair[1]._programs) == [(4, True, True, True, ())]


def test_hessian_products():
    pair = pair_of(Inner, (7,))

    def task(client, engine):
        return engine.hessian_vector_product(
            model_of(engine, client), batches_of(client, [9])[0], near(torch.zeros(232), 1)
        )

    assert_same_gradients(*both(pair, task))


def test_programs_are_for_powers_of_two_and_their_results_are_not_overwritten(caplog):
    """Steps of five, three and two clients use stacks of 8, 4 and 2. Each client's result has its own memory."""
    pair = pair_of(Inner, (7,))
    sizes = [(32,), (9, 9), (9, 9), (32, 32, 5), (4, 6, 1)]

    def task(client, engine):
        return engine.run_optimizer(model_of(engine, client), batches_of(client, sizes[client]))

    with caplog.at_level("INFO"):
        first, again = (both(pair, task, range(5))[1] for _ in range(2))
    assert sorted(pair[1]._programs) == [(size, True, True, True, ()) for size in (2, 4, 8)]
    assert caplog.text.count("Engine fused: compiled a step of 8 clients in") == 1
    assert all(torch.equal(one.model, other.model) for (one, _), (other, _) in zip(first, again, strict=True))


@pytest.mark.parametrize("network", [Counting, Frozen])
def test_buffers_and_parameters_that_are_not_trained(network):
    """They are right also in the first step of a program, before which it is traced."""
    pair = pair_of(network, (7,), partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1))
    assert_same_training(pair)


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
    check_fused(pair[1].module, SampleSpec((7,)))
    assert_same_training(pair, range(2))


def test_no_program_exceeds_the_budget_of_clients():
    few = {"batch_size": 32, "budget": 7 * 10**5}
    (stacked,) = stacked_pair(Inner, (7,), budget=few["budget"])[1:]
    pair = pair_of(Inner, (7,), **few)
    assert stacked.most_clients not in (1, 2, 4, 8, 16, 32)
    assert pair[1].most_clients == 2 ** (len(f"{stacked.most_clients:b}") - 1)
    both(
        pair,
        lambda i, engine: engine.run_optimizer(model_of(engine, i), batches_of(i, (9,))),
        range(stacked.most_clients),
    )
    assert max(clients for clients, *_ in pair[1]._programs) == pair[1].most_clients


def test_programs_are_no_longer_than_the_longest_batch():
    data, fabric = loaded(blobs(batch_size=10**6)), Fabric(accelerator="cpu", devices=1)
    engine = make_engine("fused", fabric, blobs_module(), data)
    assert engine._batch_size == data.population.sizes.max() < 10**3
    assert engine.most_clients == 256


def test_a_client_that_diverges_does_not_affect_the_others():
    assert_only_this_client_diverges(pair_of(Inner, (7,), partial(torch.optim.SGD, lr=0.05, momentum=0.9)), 3)


@pytest.mark.parametrize(
    "module",
    [
        partial(FederatedModule, Normal),
        partial(Logging, Plain),
        partial(LoggingScores, Plain),
        partial(FederatedModule, Plain, loss=nn.NLLLoss()),
    ],
)
def test_refuses_modules_that_cannot_use_one_batch_size(module):
    with pytest.raises(Unsupported, match="cannot be compiled for one size of batch"):
        check_fused(module(), SampleSpec(SHAPE))
    with pytest.raises(Unsupported, match="cannot be compiled for one size of batch"):
        check_fused(FederatedModule(Watching), SampleSpec((7,)))


def test_is_chosen_only_by_name():
    assert choose_engine("fused", blobs_module(), blobs(), "cpu", "32-true") == "fused"
    with pytest.raises(ValueError, match=r"trainer\.engine: got fused, but 16-mixed needs a loss scale"):
        choose_engine("fused", blobs_module(), blobs(), "cuda", "16-mixed")


def test_is_refused_without_the_requirements_of_torch_compile(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"got fused, but torch\.compile needs a compiler, and there is no C"):
        choose_engine("fused", blobs_module(), blobs(), "cpu", "32-true")
    monkeypatch.setattr("lcfl.engines.fused.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"got fused, but torch\.compile needs the package triton"):
        choose_engine("fused", blobs_module(), blobs(), "cuda", "32-true")


@pytest.mark.slow
def test_compiled_by_inductor():
    pair = pair_of(*NETWORKS["LeNet5"], partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    runs = both(pair, lambda i, engine: engine.run_optimizer(model_of(engine, i), batches_of(i, (32, 17)[i % 2 :])))
    assert_same_runs(*runs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_federation_on_two_ranks(tmp_path):
    names = ("sequential", "fused")
    assert_agree([fit(tmp_path / name, "lcfed", 2, 2, f"--trainer.engine={name}").path for name in names])
