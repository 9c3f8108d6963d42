"""The result of a task depends on its arguments, and not on what happened in the process before."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torchmetrics import MeanAbsoluteError, R2Score

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.data.views import Relabelling, View
from lcfl.distributed.tasks import Failure, TrainingTask
from lcfl.distributed.worker import ScoringTask, Worker, measure
from lcfl.engines import ChosenEngine
from lcfl.methods.local import LocalTraining
from lcfl.models import MLP, SplitNetwork
from lcfl.models.module import FederatedModule
from tests.helpers.builders import alone, dealt, fedavg, linear_module, two_sided

INPUTS, TARGETS, TRAIN, TEST = two_sided(size=6)
SAME = [TRAIN[0][[3] * 6]] * 2  # two clients with one sample repeated, so the order of batches does not matter


def noisy():
    return SplitNetwork(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5)), nn.Linear(8, 2))


def worker(module=None, method=None, seed=0, train=TRAIN, engine="sequential"):
    module = module or FederatedModule(noisy, partial(torch.optim.SGD, lr=0.5))
    data = dealt(INPUTS, TARGETS, train, test=TEST)
    return Worker(
        Fabric(accelerator="cpu", devices=1), module, data, method or alone(steps=2), seed, ChosenEngine(engine)
    )


START = FederatedModule(noisy).initial_model(0)


def task(client=0, number=0, **fields):
    return TrainingTask(client, number, ClientState(START, 7), Downlink({}), **fields)


def test_dropout_draws_from_the_clients_own_stream():
    same = worker(train=SAME)
    first = same.train(task()).output.model
    torch.manual_seed(99)
    same.train(task(1, 5))
    before = torch.get_rng_state()
    assert torch.equal(same.train(task()).output.model, first)
    assert torch.equal(torch.get_rng_state(), before)
    others = [same.train(task(client=1)), same.train(task(number=1)), worker(seed=1, train=SAME).train(task())]
    models = torch.stack([first, *(result.output.model for result in others)])
    assert torch.pdist(models).min() > 0


def test_evaluation_between_two_runs_changes_nothing():
    one = worker()
    first = one.train(task()).output.model
    one.score(ScoringTask(START + 1, (TEST[0],), (4, 7)))
    assert torch.equal(one.train(task()).output.model, first)


@pytest.mark.parametrize(("method", "keeps"), [(alone(steps=2), True), (fedavg(steps=2), False)])
def test_a_result_contains_the_new_state_and_the_uplink(method, keeps):
    start = Downlink({"model": START}) if not keeps else Downlink({})
    result = worker(method=method).train(TrainingTask(1, 0, ClientState(START, 7), start))
    assert (result.state.model is result.output.model) == keeps
    assert result.state.consumed == 7 + 5 + 6  # the rest of the second pass, and a third
    assert (result.uplink.client, result.uplink.num_samples) == (1, 6)
    assert list(result.uplink.payload) == ([] if keeps else ["model"])
    assert result.is_finite()


def test_a_task_may_bring_its_own_local_update():
    short = worker().train(task(local_update=LocalTraining(steps=1)))
    assert short.state.consumed == 7 + 5
    assert not torch.equal(short.output.model, worker().train(task()).output.model)


def test_an_exception_becomes_a_failure():
    class Broken(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            raise ZeroDivisionError("by hand")

    failure = worker(Broken(noisy)).run(task(1, -1))
    assert isinstance(failure, Failure)
    assert failure.message == "client 1, round -1, rank 0: ZeroDivisionError: by hand"
    assert "training_step" in failure.details
    failure = worker(linear_module()).run(ScoringTask(torch.zeros(3), (TEST[0],), (4, 7)))
    assert failure.message.startswith("evaluation of the model of clients 4, 7, rank 0: ")


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_client_that_fails_is_named_and_the_others_continue(engine):
    module = linear_module()
    start, short = module.initial_model(0), torch.zeros(3)
    tasks = [TrainingTask(i % 2, 4, ClientState(short if i == 1 else start, 7), Downlink({})) for i in range(3)]
    tasks += [ScoringTask(model, (TEST[0],), (number,)) for number, model in enumerate([start, short, start])]
    outcomes = worker(module, engine=engine).run_all(tasks)
    failed = [outcome.message for outcome in outcomes if isinstance(outcome, Failure)]
    assert [message.partition(", rank 0: ")[0] for message in failed] == [
        "client 1, round 4",
        "evaluation of the model of client 1",
    ]
    assert torch.equal(outcomes[0].output.model, outcomes[2].output.model)
    assert outcomes[3] == outcomes[5]
    alone_ = worker(module).run_all([tasks[0], tasks[3]])
    torch.testing.assert_close(outcomes[0].output.model, alone_[0].output.model)
    assert outcomes[3] == [pytest.approx(alone_[1][0], rel=1e-5)]


def seen_through(data, *views):
    """Returns the same data, with one of the views for each client."""
    examples, people = data._loaded
    data._loaded = examples, replace(people, views=[(view,) for view in views])
    return data


def test_a_client_trains_on_its_transformed_samples():
    module = FederatedModule(noisy, partial(torch.optim.SGD, lr=0.5))
    fabric = Fabric(accelerator="cpu", devices=1)
    swapped = seen_through(dealt(INPUTS, TARGETS, TRAIN, test=TEST), View(), Relabelling((1, 0)))
    both = Worker(fabric, module, swapped, alone(steps=2), seed=0)
    expected = Worker(fabric, module, dealt(INPUTS, 1 - TARGETS, TRAIN, test=TEST), alone(steps=2), seed=0)
    assert torch.equal(both.train(task(1)).output.model, expected.train(task(1)).output.model)
    assert torch.equal(both.train(task(0)).output.model, worker().train(task(0)).output.model)


def test_a_set_is_evaluated_with_the_transforms_of_its_owner():
    module = FederatedModule(noisy)
    fabric = Fabric(accelerator="cpu", devices=1)
    data = seen_through(dealt(INPUTS, TARGETS, TRAIN, test=TEST), View(), Relabelling((1, 0)))
    one = Worker(fabric, module, data, alone(steps=2), seed=0)
    shared = TEST[0]
    plain, swapped, again, other = one.score(
        ScoringTask(START, (shared, shared, shared, TRAIN[1]), (0, 1), tuple((i, "own_split") for i in (0, 1, 0, 0)))
    )
    raw, raw_other = one.score(ScoringTask(START, (shared, TRAIN[1]), (0, 1)))
    assert plain == again == raw and other == raw_other
    assert swapped["acc"] == pytest.approx(1 - raw["acc"]) and swapped["loss"] != raw["loss"]


def test_large_outputs_are_measured_in_pieces(monkeypatch):
    """Accuracy and loss are those of all samples at once, up to rounding."""
    evaluation = ScoringTask(START, (TRAIN[0], TEST[1]), (0, 1))
    whole = worker().score(evaluation)
    monkeypatch.setattr("lcfl.distributed.worker.OUTPUT_BYTES", 4 * 2 * 2)  # of two samples with two scores each
    pieces = worker()
    assert pieces._most_outputs == 2
    for expected, found in zip(whole, pieces.score(evaluation), strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


def test_models_that_are_measured_in_pieces_side_by_side_keep_their_metrics_apart(monkeypatch):
    monkeypatch.setattr("lcfl.distributed.worker.OUTPUT_BYTES", 4 * 2 * 2)
    module = partial(FederatedModule, partial(MLP, 2, (8,), 2))
    tasks = [ScoringTask(module().initial_model(number), (TRAIN[number % 2],), (number,)) for number in range(4)]
    found = worker(module(), engine="stacked").run_all(tasks)
    for (expected,), (measured,) in zip(worker(module()).run_all(tasks), found, strict=True):
        assert measured == pytest.approx(expected, rel=1e-5)
    assert len({measured["acc"] for (measured,) in found}) > 1


def test_models_that_are_measured_at_once_share_the_memory_for_outputs():
    stacked = worker(FederatedModule(partial(MLP, 2, (8,), 2)), engine="stacked")
    assert stacked.engine.most_clients > 1
    assert stacked._most_outputs * stacked.engine.most_clients <= worker()._most_outputs


def test_pieces_of_a_loss_weigh_what_it_counts():
    """The mean of cross-entropy is over the targets that are not ignored, by their class weights."""
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(6, 3, 4, generator=draw)
    targets = torch.randint(3, (6, 4), generator=draw)
    targets[1, 1:] = targets[2:4] = -100
    for weight in (None, torch.tensor([1.0, 2.0, 0.5])):
        module = linear_module(loss=nn.CrossEntropyLoss(weight=weight))
        whole = measure(module, [(outputs, targets)])
        pieces = measure(module, zip(outputs.split(2), targets.split(2), strict=True))
        assert pieces["loss"] == pytest.approx(whole["loss"], rel=1e-6)


def test_a_metric_that_one_sample_does_not_have_is_left_out_for_it():
    module = FederatedModule(
        partial(nn.Linear, 2, 1),
        cut=None,
        loss=nn.MSELoss(),
        metrics={"r2": R2Score(), "mae": MeanAbsoluteError()},
        report="mae",
    )
    outputs, targets = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.5], [2.0]])
    assert set(measure(module, [(outputs, targets)])) == {"loss", "r2", "mae"}
    assert measure(module, [(outputs[:1], targets[:1])]) == {"loss": 0.25, "mae": 0.5}


def test_pixels_that_the_loss_ignores_do_not_count_in_the_accuracy():
    module = FederatedModule(partial(nn.Conv2d, 1, 2, 1), cut=None, loss=nn.CrossEntropyLoss(ignore_index=1))
    scores = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1).expand(1, 2, 2, 2)
    assert measure(module, [(scores, torch.tensor([[[0, 0], [1, 1]]]))])["acc"] == 1
