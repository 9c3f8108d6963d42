"""A fleet gives the same models and metrics as a simulation, bit for bit, and goes on whatever is lost on the way."""

import json
import signal
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from lcfl.callbacks import Checkpoint
from lcfl.cli import federated_cli
from lcfl.cli.commands.fleet import write_app
from lcfl.cli.federated_cli import instantiate, instantiate_trainer
from lcfl.cli.fleet_config import node_of, options_of
from lcfl.core.callback import Callback
from lcfl.data.datasets import Synthetic
from lcfl.fleet import server
from lcfl.fleet.post import Patience
from lcfl.fleet.server import FleetOptions
from lcfl.methods.exchange.transforms import LowRankCompression
from lcfl.models.module import FederatedModule
from lcfl.runs.checkpoint import CheckpointError
from tests.fleet.fleets import (
    AWAY,
    FIRST,
    SOME,
    Stop,
    assert_same_fields,
    assert_same_numbers,
    data,
    dropped,
    federation,
    module,
    node,
    nodes,
    on_fleet,
    simulated,
)
from tests.helpers.builders import NormedMLP, alone, ditto, fedavg, fedper, lcfed
from tests.helpers.commandline import CONFIGS, METHODS, SYNTHETIC
from tests.helpers.fits import OWN
from tests.helpers.loopback import Loopback

SMALL = ("--data.num_clients=10", "--trainer.rounds=3", "--trainer.clients_per_round=4", "--trainer.evaluate_every=2")
SMALL += ("--trainer.devices=1", "--trainer.enable_progress_bar=false", "--trainer.logger=false")


def settings(method):
    return [*map(str, SYNTHETIC), "-c", str(method), *SMALL, *OWN.get(method.stem, ())]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in ("ifca", "lcfed") else [pytest.mark.slow])
        for path in METHODS
    ],
)
def test_the_same_yaml_gives_the_same_bits_on_a_fleet(here, method):
    assert_same_on_a_fleet(here, settings(method))


def test_clients_leave_a_fleet_as_they_leave_a_simulation(here):
    assert_same_on_a_fleet(here, [*settings(CONFIGS / "methods" / "fedavg.yaml"), "--data.leavers={3: 1, 7: 2}"])


def assert_same_on_a_fleet(here, words):
    """Asserts that a fleet with an app of these words has the state, metrics and models of the simulation."""
    simulation = federated_cli.main(["fit", *words, "--trainer.name=simulation"])
    write_app(here / "app", words)
    config = here / "app" / "config.yaml"

    def node(place):
        own = {"data": str(here / "app/config.yaml"), "state": str(here / f"node{place}"), "client": place}
        return node_of(config, own)

    link = Loopback({FIRST + place: partial(node, place) for place in range(10)})
    options = options_of(config, {"min-answers": 1.0})
    run = server.fit(instantiate_trainer(config), *instantiate(config), link, options)
    assert_same_fields(run.state, simulation.state)
    assert_same_numbers(run.metrics, simulation.metrics)
    assert_same_models(run, simulation)


def assert_same_models(run, simulation):
    """Asserts that the run of a fleet gives the models of the simulation, or refuses those that only nodes know."""
    exchange = instantiate(simulation.path / "config.yaml")[1].exchange
    for kind, client in product(exchange.models, range(10)):
        try:
            expected = simulation.model(kind, client).state_dict()
        except ValueError:  # it needs the client's data
            continue
        if kind == "personal" and exchange.hides_model:
            with pytest.raises(ValueError, match="whose clients keep their models or parts of them on their nodes"):
                run.model(kind, client)
        else:
            assert_same_numbers(run.model(kind, client).state_dict(), expected)


def compressed():
    method = lcfed()
    return replace(method, exchange=replace(method.exchange, transforms=[LowRankCompression()]))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (fedper, "The server has no whole model"),
        (alone, "The server has no whole model"),
        (ditto, "The server has the kinds cluster and global"),
        (compressed, "The server has the kinds cluster and global"),
    ],
)
def test_a_model_that_only_a_node_has_is_not_given_by_the_server(tmp_path, method, words):
    run = on_fleet(tmp_path, method, rounds=1).run
    with pytest.raises(ValueError, match=f"got kind='personal', but {run.path} is the run of a fleet.*{words}"):
        run.model("personal", 1)


def test_buffers_that_only_a_node_has_are_not_given_by_the_server(tmp_path):
    made = partial(FederatedModule, NormedMLP, partial(torch.optim.SGD, lr=0.05), buffer_policy="local")
    own = partial(data, drop_last=True)
    link = Loopback({FIRST + i: partial(node, tmp_path, fedavg, i, own, made) for i in range(6)})
    options = FleetOptions(6, {"batch_size": 8, "drop_last": True})
    run = server.fit(federation(tmp_path, rounds=1), made(), fedavg(), link, options)
    assert run.model("global") is not None
    with pytest.raises(ValueError, match=r"got client=1, .* whose clients keep their buffers on their nodes"):
        run.model("global", 1)


def test_only_what_the_method_exchanges_leaves_a_node(tmp_path):
    watch = on_fleet(tmp_path, fedper)
    sizes = {
        int(np.prod(each["shape"])) for _, _, answer in watch.link.sent for each in json.loads(answer.text)["arrays"]
    }
    assert sizes == {module().layout.num_embedding}
    assert not list(watch.state.clients), "the server has no client's state"
    kept = tmp_path.glob("node*/*/client-*/round-*.pt")
    assert {path.parent.name for path in kept} == {f"client-{i}" for i in range(6)}


@pytest.mark.parametrize(
    "method", [lcfed, fedper, *(pytest.param(each, marks=pytest.mark.slow) for each in (fedavg, alone))]
)
def test_a_resumed_server_takes_its_clients_back_to_the_checkpoint(tmp_path, method):
    """The server saves every second round and dies after the third."""

    class Dying(Callback):
        def on_round_logged(self, state):
            if state.round == 3:
                raise KeyboardInterrupt

    saved = Checkpoint(every_n_rounds=2)
    with pytest.raises(KeyboardInterrupt):
        on_fleet(tmp_path, method, callbacks=[saved, Dying()])
    watch = on_fleet(tmp_path, method, callbacks=[Checkpoint(every_n_rounds=2)], ckpt_path="last")
    whole = simulated(tmp_path / "simulation", method)
    assert_same_fields(watch.state, whole.state)
    assert watch.state.total_bytes == whole.state.total_bytes
    assert_same_numbers(watch.metrics, whole.metrics)
    assert watch.run.path.name == "version_0"


def test_a_federation_that_has_led_a_fleet_can_lead_it_again_and_simulate(tmp_path):
    made, link = federation(tmp_path, rounds=2, callbacks=[Checkpoint()]), Loopback(nodes(tmp_path, fedavg))
    before, options = list(made.all_callbacks), FleetOptions(6, {"batch_size": 8})
    run = server.fit(made, module(), fedavg(), link, options)
    made.rounds = 4
    resumed = server.fit(made, module(), fedavg(), link, options, ckpt_path="last")
    assert made.all_callbacks == before and resumed.path == run.path
    simulation = made.fit(module(), data(), fedavg())
    assert_same_fields(resumed.state, simulation.state)


class Signal(Callback):
    """Sends SIGTERM to this process in the middle of a round."""

    def __init__(self, number):
        self.number = number

    def on_clients_sampled(self, state):
        if state.round == self.number:
            signal.raise_signal(signal.SIGTERM)


def test_a_fleet_that_is_told_to_stop_completes_its_round(tmp_path):
    stopped = on_fleet(tmp_path, lcfed, callbacks=[Checkpoint(every_n_rounds=10), Signal(1)])
    assert stopped.run.signal == signal.SIGTERM and stopped.state.round == 2
    watch = on_fleet(tmp_path, lcfed, callbacks=[Checkpoint(every_n_rounds=10)], ckpt_path="last")
    whole = simulated(tmp_path / "simulation", lcfed)
    assert_same_fields(watch.state, whole.state)


def test_a_fleet_that_cannot_complete_its_round_stops_all_the_same(tmp_path):
    link = Loopback(nodes(tmp_path, fedavg), lambda message, count: AWAY if message.kind == "train" else None)
    with pytest.raises(InterruptedError, match="too few answers to complete the round"):
        on_fleet(tmp_path, fedavg, link=link, callbacks=[Signal(0)])


@pytest.mark.parametrize(
    ("wanted", "words"), [("abc", "min-answers: got 'abc'; it must be a number"), (0, "from 1"), (1.5, "a share in")]
)
def test_patience_with_other_values_is_refused(wanted, words):
    with pytest.raises(ValueError, match=words):
        Patience(min_answers=wanted)


def test_more_answers_than_clients_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"min-answers: got 7, but data\.num_clients is 6"):
        on_fleet(tmp_path, fedavg, patience=Patience(min_answers=7))


def test_the_checkpoint_of_a_simulation_is_no_run_of_a_fleet(tmp_path):
    simulated(tmp_path, fedavg)
    with pytest.raises(CheckpointError, match=r"version_0 is not the run of a fleet: it has no fleet.json"):
        on_fleet(tmp_path, fedavg, ckpt_path="last")


def test_data_that_have_grown_do_not_stop_a_run_from_being_resumed(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        on_fleet(tmp_path, lcfed, callbacks=[Checkpoint(every_n_rounds=1), Stop(2)])
    grown = partial(data, dataset=Synthetic(samples_per_class=80))
    made = {each: partial(one, section=grown) for each, one in nodes(tmp_path, lcfed).items()}
    with pytest.warns(UserWarning, match="hospital 0: its data have changed since it joined"):
        watch = on_fleet(tmp_path, lcfed, link=Loopback(made), callbacks=[Checkpoint()], ckpt_path="last")
    assert watch.state.round == 4 and dropped(watch) == [0, 0]


CLASSES = [f"class {number}" for number in range(8)]


class Named(Synthetic):
    """Synthetic data whose classes have names, in an order that the test changes."""

    order = CLASSES

    @property
    def classes(self):
        return tuple(self.order)


@pytest.mark.parametrize("is_resumed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_node_whose_classes_have_changed_does_not_train(tmp_path, monkeypatch, is_resumed):
    """The data section of one node is edited after two rounds."""

    class Other(Named):
        order = CLASSES

    class Edit(Callback):
        def on_round_logged(self, server, state):
            if state.round == 2:
                monkeypatch.setattr(Other, "order", CLASSES[::-1])
                if is_resumed:
                    raise RuntimeError("stop")

    sections = [partial(data, dataset=(Other if place == 1 else Named)(samples_per_class=60)) for place in range(6)]
    made = {FIRST + place: partial(node, tmp_path, fedavg, place, section=each) for place, each in enumerate(sections)}
    link = Loopback(made, restarts=True)
    options = {"link": link, "patience": SOME, "clients_per_round": 1.0, "callbacks": [Checkpoint(every_n_rounds=1)]}
    with pytest.warns(
        UserWarning, match=r"1 of 6 clients are left out: 1 \(hospital 1\): .* look different from before"
    ):
        if is_resumed:
            with pytest.raises(RuntimeError, match="stop"):
                on_fleet(tmp_path, fedavg, **options | {"callbacks": [Checkpoint(every_n_rounds=1), Edit()]})
            watch = on_fleet(tmp_path, fedavg, ckpt_path="last", **options)
        else:
            watch = on_fleet(tmp_path, fedavg, **options | {"callbacks": [Edit()]})
    assert dropped(watch)[-2:] == [1, 1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"spec": {"shape": [7]}}, r"its samples do not fit: model.network: MLP cannot take inputs of shape \(7,\)"),
        ({"spec": {"shape": [2**30]}}, "its samples do not fit: spec: got a sample of 1073741825 numbers"),
        ({"name": "a\nb"}, "must have 1 to 100 printable signs"),
        ({"sizes": {"train": 10**30}}, "the answer was refused: sizes"),
        ({"sizes": {"train": 0}}, "it must have some in train"),
        ({"lcfl": "0.0.1"}, "it has lcfl 0.0.1, and the server"),
        ({"identity": "00"}, "it has another network, method or version"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_the_others_go_on(tmp_path, monkeypatch, fields, words):
    """It answers as it should when it is asked again."""
    monkeypatch.setattr("lcfl.fleet.server.AGAIN", 0.01)

    def change(answer):
        header = json.loads(answer.text)
        for name, value in fields.items():
            own = header["fields"][name]
            header["fields"][name] = own | value if isinstance(value, dict) else value
        return replace(answer, text=json.dumps(header))

    link = Loopback(nodes(tmp_path, fedavg), lambda message, count: change if count == 0 else None)
    with pytest.warns(UserWarning, match=rf"node 1000\)? (does not take part|has not joined yet): .*{words}"):
        watch = on_fleet(tmp_path, fedavg, link=link, rounds=1)
    assert watch.state.round == 1


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        (partial(lcfed, keep_offline_models=True), {}, "LowRankCosine gives clients their models of a warm-up round"),
        (fedavg, {"fast_dev_run": True}, "trainer.fast_dev_run: it tries a run on one machine"),
    ],
)
def test_what_a_fleet_cannot_do_is_refused_before_anybody_joins(tmp_path, method, options, words):
    with pytest.raises(ValueError, match=words):
        on_fleet(tmp_path, method, link=Loopback({}), **options)
