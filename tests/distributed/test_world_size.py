"""One rank and several give the same bits, also if the parent has computed with two threads."""

from itertools import product

import pytest
import torch

from lcfl.distributed.connections import Connection, NetworkConnection
from lcfl.distributed.ranks import Ranks
from lcfl.distributed.worker import Worker
from lcfl.engines import ChosenEngine
from lcfl.federation.session import Session, Settings
from lcfl.server.schedule import Schedule
from tests.helpers import builders
from tests.helpers.builders import blobs, blobs_module, dealt, fedavg, lcfed, linear_module, two_sided
from tests.helpers.fits import ROUNDS, assert_same_run, fit

CLUSTERED = ("lcfed", "lcfed_plus", "fedac")
BASELINES = ("fedavg", "local", "fedprox", "fednova", "fedper", "lg_fedavg", "per_fedavg")
BASELINES += ("scaffold", "feddyn", "fedadam", "ditto", "pfedme")
BASELINES += ("apfl", "fedala", "fedamp", "fedrep", "fedbabu", "fedbn", "clove", "fedlc")
BASELINES += ("fedavgm", "fedyogi", "fedadagrad", "cfl_fixed")
QUICK = {("lcfed", 2), ("lcfed", 3), ("per_fedavg", 2)}  # all others are marked slow


@pytest.mark.parametrize(
    ("method", "ranks"),
    [
        pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.slow])
        for each in product((*CLUSTERED, *BASELINES), (2, 3))
    ],
)
def test_ranks_do_not_change_bits(tmp_path, reference, method, ranks):
    one, _ = reference(method)
    assert_same_run(one, fit(tmp_path, method, ranks).path)


def test_a_parent_that_computed_with_two_threads_does_not_change_bits(tmp_path, reference):
    one, _ = reference("lcfed")
    torch.set_num_threads(2)
    left = torch.rand(700, 700)
    (left @ left).sum()
    for ranks in (1, 2):
        assert_same_run(one, fit(tmp_path / str(ranks), "lcfed", ranks).path)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("method", ["lcfed", pytest.param("per_fedavg", marks=pytest.mark.slow)])
def test_bfloat16_steps_have_the_same_bits_on_two_ranks(tmp_path, method):
    one = fit(tmp_path / "1", method, 1, 2, "--trainer.precision=bf16-mixed").path
    two = fit(tmp_path / "2", method, 2, 2, "--trainer.precision=bf16-mixed").path
    full = fit(tmp_path / "3", method, 1, 2).path
    assert_same_run(one, two)
    with pytest.raises(AssertionError):
        assert_same_run(one, full)


def test_ranks_that_have_chosen_another_engine_use_the_servers(tmp_path, on_ranks, monkeypatch):
    """Under torchrun every rank chooses by itself, on a machine that may lack a compiler."""

    class Noting(Worker):
        def __init__(self, fabric, *arguments):
            super().__init__(fabric, *arguments)
            (tmp_path / f"rank{fabric.global_rank}").write_text(type(self.engine).__name__)

    def work(fabric, flag):
        engine = ChosenEngine(("stacked", "sequential")[fabric.global_rank])
        settings = Settings(rounds=1, logger=False, enable_progress_bar=False, default_root_dir=tmp_path, name="run")
        session = Session(settings, Schedule(1, 4, 0), engine, "fit", blobs_module(), blobs(), fedavg(), None, None)
        return session(fabric, flag)

    monkeypatch.setattr("lcfl.federation.session.Worker", Noting)
    on_ranks(2, work)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["StackedEngine"] * 2


@pytest.mark.parametrize("method", ["fednova", pytest.param("lcfed", marks=pytest.mark.slow)])
def test_ranks_without_shared_memory_give_the_same_bits(tmp_path, reference, monkeypatch, method):
    """Every message goes over gloo, as between several machines."""
    links, send = tmp_path / "links", NetworkConnection.send

    def noted(link, message):
        with links.open("a") as file:
            file.write(".")
        send(link, message)

    monkeypatch.setattr("lcfl.distributed.ranks.can_share_memory", lambda: False)
    monkeypatch.setattr(NetworkConnection, "send", noted)
    one, _ = reference(method)
    assert_same_run(one, fit(tmp_path, method, 2).path)
    assert len(links.read_text()) > ROUNDS


def test_a_round_is_one_exchange_with_each_rank(tmp_path, monkeypatch):
    sent, send = tmp_path / "sent", Connection.send

    def counted(link, message):
        if link.peer > 0:  # from the server
            with sent.open("a") as file:
                file.write(".")
        send(link, message)

    def number(rounds):
        sent.write_text("")
        builders.fit(blobs_module(), blobs(), lcfed(), tmp_path / str(rounds), rounds, 0.5, devices=3)
        return len(sent.read_text())

    monkeypatch.setattr(Connection, "send", counted)
    assert number(4) - number(2) == 2 * 2


def test_ranks_are_balanced_by_the_samples_that_clients_compute(tmp_path, monkeypatch):
    """The clients train on seven, two and four samples in two epochs each."""
    balanced_by, original = [], Ranks.map

    def recording(ranks, tasks, costs):
        balanced_by.append(list(costs))
        return original(ranks, tasks, costs)

    monkeypatch.setattr(Ranks, "map", recording)
    inputs, targets, (images, _), test = two_sided(2, size=14)
    data = dealt(inputs, targets, [images[:7], images[7:9], images[9:13]], test=[test[0]] * 3)
    builders.fit(linear_module(), data, fedavg(epochs=2), tmp_path)
    assert balanced_by[0] == [14, 4, 8]
