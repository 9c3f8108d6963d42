"""Tests of what a local run starts from, which batches it gets and how many samples it has consumed."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, nan

import numpy as np
import pytest
import torch

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local import AlternatingTraining, FineTunedTraining, LocalTraining
from lcfl.methods.local.training import LocalData, OptimizerResult, mean_logged
from lcfl.models import Layout
from lcfl.models.pulls import NO_PULLS
from tests.helpers.builders import Normed

LAYOUT = Layout.from_network(Normed())
OWN, CENTRE, MODEL = (torch.full((LAYOUT.size,), value) for value in (1.0, 2.0, 3.0))
EMBEDDING = torch.full((LAYOUT.num_embedding,), 4.0)
BOTH = Downlink({"centre": CENTRE, "embedding": EMBEDDING})
NOTHING = Downlink({})


class Recorder:
    """An engine that records the arguments of its calls and trains nothing."""

    layout, max_steps = LAYOUT, None

    def run_optimizer(self, start, batches, pulls=NO_PULLS, rate_scale=1.0, part="all"):
        self.rate_scale = rate_scale
        self.start, self.batches = start, [batch.tolist() for batch in batches]
        self.pulls = pulls
        return OptimizerResult(start + 0.5, 0.25, {"aux": 2.0})


def data(num_samples=10, batch_size=4, drop_last=False, round=0):
    return LocalData(np.arange(100, 100 + num_samples), batch_size, 0, client=5, drop_last=drop_last, round=round)


def run(update, consumed=0, downlink=NOTHING, local=None):
    recorder = Recorder()
    trained = update(ClientState(OWN, consumed), downlink, local or data(), recorder)
    return recorder, trained


def test_a_run_starts_from_the_clients_own_model_by_default():
    recorder, _ = run(LocalTraining(steps=1), downlink=BOTH)
    assert recorder.start is OWN


def test_start_centre():
    recorder, _ = run(LocalTraining(steps=1, start="centre"), downlink=BOTH)
    assert recorder.start is CENTRE


def test_start_embedding_is_phi_with_the_clients_own_decision_head_and_buffers():
    recorder, _ = run(LocalTraining(steps=1, start="embedding"), downlink=BOTH)
    assert recorder.start.tolist() == [4.0] * 15 + [1.0] * 15


@pytest.mark.parametrize("start", ["own", "centre", "embedding"])
def test_a_run_starts_from_a_model_in_the_downlink(start):
    recorder, _ = run(LocalTraining(steps=1, start=start), downlink=Downlink({"model": MODEL}))
    assert recorder.start is MODEL
    assert recorder.pulls == NO_PULLS


def test_the_pulls_are_those_of_the_downlink():
    recorder, _ = run(LocalTraining(steps=1), downlink=BOTH)
    assert recorder.pulls.centre is CENTRE
    assert recorder.pulls.embedding is EMBEDDING
    recorder, _ = run(LocalTraining(steps=1))
    assert recorder.pulls == NO_PULLS


def test_the_output_is_that_of_the_engine():
    _, trained = run(LocalTraining(steps=2))
    assert torch.equal(trained.model, OWN + 0.5)
    assert (trained.consumed, trained.loss) == (8, 0.25)


def test_two_participations_of_five_steps_equal_one_of_ten():
    five, ten = LocalTraining(steps=5), LocalTraining(steps=10)
    first, trained = run(five)
    second, again = run(five, consumed=trained.consumed)
    whole, once = run(ten)
    assert first.batches + second.batches == whole.batches
    assert again.consumed == once.consumed == 34  # 4 4 2 4 4 | 2 4 4 2 4
    assert first.batches != second.batches


def test_an_epoch_draws_every_sample_once():
    recorder, trained = run(LocalTraining(epochs=2))
    assert [len(batch) for batch in recorder.batches] == [4, 4, 2, 4, 4, 2]
    for part in (recorder.batches[:3], recorder.batches[3:]):
        assert sorted(chain(*part)) == list(range(100, 110))
    assert trained.consumed == 20


def test_epochs_begin_with_a_whole_pass():
    recorder, trained = run(LocalTraining(epochs=1), consumed=13)
    fresh, _ = run(LocalTraining(epochs=1), consumed=20)
    assert recorder.batches == fresh.batches
    assert trained.consumed == 30


def test_a_step_of_a_small_client_draws_all_its_samples():
    recorder, trained = run(LocalTraining(steps=3), local=data(num_samples=2, batch_size=32))
    assert [sorted(batch) for batch in recorder.batches] == [[100, 101]] * 3
    assert trained.consumed == 6


def test_an_epoch_without_its_last_batch_is_floor_n_over_b_batches():
    local = data(drop_last=True)
    recorder, trained = run(LocalTraining(epochs=2), local=local)
    assert [len(batch) for batch in recorder.batches] == [4, 4, 4, 4]
    assert trained.consumed == 16
    again, onwards = run(LocalTraining(epochs=1), trained.consumed, local=local)
    whole, _ = run(LocalTraining(epochs=3), local=local)
    assert recorder.batches + again.batches == whole.batches
    assert onwards.consumed == 24


@pytest.mark.parametrize("first", range(1, 5))
def test_steps_with_drop_last_continue_where_they_ended(first):
    local = data(drop_last=True)
    one, trained = run(LocalTraining(steps=first), local=local)
    two, again = run(LocalTraining(steps=5), trained.consumed, local=local)
    whole, once = run(LocalTraining(steps=first + 5), local=local)
    assert one.batches + two.batches == whole.batches
    assert again.consumed == once.consumed == 4 * (first + 5)


def test_a_small_client_keeps_its_one_short_batch():
    recorder, trained = run(LocalTraining(epochs=2), local=data(num_samples=3, drop_last=True))
    assert [sorted(batch) for batch in recorder.batches] == [[100, 101, 102]] * 2
    assert trained.consumed == 6


@pytest.mark.parametrize(("num_samples", "batch_size"), [(10, 4), (9, 4), (8, 4), (3, 4), (5, 1)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "update", [LocalTraining(epochs=2), LocalTraining(epochs=1, fill_batch=True), LocalTraining(steps=2)]
)
def test_the_cost_is_the_number_of_samples_that_a_run_draws(num_samples, batch_size, drop_last, update):
    local = data(num_samples, batch_size, drop_last)
    recorder, _ = run(update, local=local)
    assert update.cost(local.samples_per_epoch, batch_size) == sum(map(len, recorder.batches))


def test_the_cost_counts_samples():
    assert LocalTraining(epochs=3).cost(50, 32) == 150
    assert LocalTraining(steps=5).cost(50, 32) == 160
    assert LocalTraining(steps=5).cost(20, 32) == 100


def test_a_straggler_does_between_one_and_all_but_one():
    local = [replace(data(), client=client, round=round_) for client in range(20) for round_ in range(20)]
    for amount in ("steps", "epochs"):
        update = LocalTraining(**{amount: 4}, stragglers=0.3)
        runs = [run(update, local=each) for each in local]
        per_unit = 3 if amount == "epochs" else 1
        done = Counter(len(recorder.batches) / per_unit for recorder, _ in runs)
        assert set(done) == {1, 2, 3, 4}
        assert 0.6 < done[4] / 400 < 0.8
        assert [trained.num_steps for _, trained in runs] == [len(recorder.batches) for recorder, _ in runs]
        again = [run(update, local=each)[0].batches for each in local]
        assert again == [recorder.batches for recorder, _ in runs]
    whole = run(LocalTraining(epochs=2), local=local[0])
    for recorder, trained in (run(LocalTraining(epochs=4, stragglers=1.0), local=each) for each in local[:20]):
        shorter = min(len(recorder.batches), len(whole[0].batches))
        assert recorder.batches[:shorter] == whole[0].batches[:shorter]
        assert trained.consumed == 10 * len(recorder.batches) // 3


def test_a_trial_run_counts_the_steps_that_it_took():
    recorder = Recorder()
    recorder.max_steps = 2
    trained = LocalTraining(steps=5)(ClientState(OWN), NOTHING, data(), recorder)
    assert trained.num_steps == len(recorder.batches) == 2


@pytest.mark.parametrize("arguments", [{"stragglers": 1.5}, {"stragglers": -0.1}, {"stragglers": 0.5, "steps": 1}])
def test_stragglers_need_a_share_and_at_least_two_steps(arguments):
    with pytest.raises(ValueError, match=r"got stragglers=.*; allowed are shares from 0 to 1, and a share above"):
        LocalTraining(**{"steps": 5, **arguments})


@pytest.mark.parametrize("arguments", [{}, {"steps": 5, "epochs": 1}, {"steps": 0}, {"epochs": -1}])
def test_exactly_one_of_steps_and_epochs(arguments):
    with pytest.raises(ValueError, match=r"method.local_update: got steps=.*, epochs=.*; exactly one must") as error:
        LocalTraining(**arguments)
    assert f"steps={arguments.get('steps')}, epochs={arguments.get('epochs')}" in str(error.value)


def test_a_misspelt_start_is_refused():
    with pytest.raises(ValueError, match=r"LocalTraining: got start='center'; allowed are own, centre and embed"):
        LocalTraining(steps=1, start="center")


@pytest.mark.parametrize(("number", "scale"), [(-1, 1.0), (0, 1.0), (1, 0.5), (3, 0.125)])
def test_the_learning_rate_decays_with_the_training_round(number, scale):
    recorder, _ = run(LocalTraining(steps=1, lr_decay=0.5), local=data(round=number))
    assert recorder.rate_scale == scale
    recorder, _ = run(LocalTraining(steps=1), local=data(round=number))
    assert recorder.rate_scale == 1.0


def test_a_learning_rate_that_decays_for_long_stays_above_0():
    recorder, _ = run(LocalTraining(steps=1, lr_decay=0.5), local=data(round=10**6))
    assert 0 < recorder.rate_scale < 1e-20
    assert float(torch.tensor(recorder.rate_scale) * 1e-4) > 1.2e-38, "a normal number of float32"


@pytest.mark.parametrize("factor", [0, -0.5, nan, inf])
def test_a_factor_of_the_learning_rate_that_is_not_above_0_is_refused(factor):
    @dataclass(frozen=True)
    class Scheduled(LocalTraining):
        def lr_factor(self, data):
            return factor

    with pytest.raises(
        ValueError, match=rf"^Scheduled.lr_factor: got {factor} in round 3; it must be a finite number ab"
    ):
        run(Scheduled(steps=1), local=data(round=3))


@pytest.mark.parametrize(
    ("kind", "options", "further"),
    [
        (AlternatingTraining, {"head_steps": 1}, "head_training"),
        (FineTunedTraining, {"fine_tuning_steps": 1}, "adaptation"),
    ],
)
def test_every_run_of_a_local_update_has_the_users_factor(kind, options, further):
    @dataclass(frozen=True)
    class Scheduled(kind):
        def lr_factor(self, data):
            return 0.25 / data.round

    update = Scheduled(steps=1, **options)
    for each in (update, getattr(update, further)):
        recorder, _ = run(each, local=data(round=5))
        assert recorder.rate_scale == 0.05


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.5])
def test_a_decay_outside_its_range_is_refused(decay):
    with pytest.raises(ValueError, match=rf"got lr_decay={decay}; it must lie in \(0, 1\]"):
        LocalTraining(steps=1, lr_decay=decay)


@pytest.mark.parametrize(("num_samples", "epochs"), [(1, 32), (3, 11), (4, 10), (31, 10), (32, 10), (100, 10)])
def test_a_small_client_fills_a_batch(num_samples, epochs):  # max(ceil(32 / n_i), 10)
    recorder, trained = run(LocalTraining(epochs=10, fill_batch=True), local=data(num_samples, batch_size=32))
    assert trained.consumed == sum(map(len, recorder.batches)) == epochs * num_samples
    plain, _ = run(LocalTraining(epochs=10), local=data(num_samples, batch_size=32))
    assert sum(map(len, plain.batches)) == 10 * num_samples


def test_fill_batch_with_steps_is_refused():
    with pytest.raises(ValueError, match="fill_batch=true raises the number of epochs, but steps is given"):
        LocalTraining(steps=5, fill_batch=True)


def test_values_that_only_later_steps_log_are_means_over_these():
    steps = [{}, {"a": torch.tensor(2.0)}, {"a": torch.tensor(4.0), "b": torch.tensor(1.0)}]
    assert mean_logged(steps) == {"a": 3.0, "b": 1.0}
    assert mean_logged([]) == {}
