"""A fleet gives the same models and metrics as a simulation, bit for bit, and goes on whatever is lost on the way."""

import json
import re
import signal
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

import lcfl
import lcfl.federation.session
from lcfl.callbacks import Checkpoint
from lcfl.cli import federated_cli
from lcfl.cli.commands.fleet import write_app
from lcfl.cli.federated_cli import instantiate, instantiate_trainer
from lcfl.cli.fleet_config import node_of, options_of
from lcfl.core.callback import Callback
from lcfl.data.datasets import Synthetic
from lcfl.federation.onboarding import onboard
from lcfl.fleet import server
from lcfl.fleet.link import Undelivered
from lcfl.fleet.messages import decode
from lcfl.fleet.parcel import Parcel
from lcfl.fleet.post import Patience
from lcfl.fleet.server import FleetOptions
from lcfl.methods.exchange.transforms import LowRankCompression
from lcfl.models.module import FederatedModule
from lcfl.runs.checkpoint import CheckpointError
from lcfl.server.schedule import Schedule
from tests.fleet.fleets import FIRST, SOME, Stop, data, federation, module, node, nodes, on_fleet, simulated
from tests.helpers.builders import NormedMLP, alone, ditto, fedavg, fedbabu, fedper, fedrep, lcfed
from tests.helpers.commandline import METHODS, NEEDS, SYNTHETIC
from tests.helpers.loopback import NEVER, Loopback
from tests.methods.clustering.test_one_shot import fedclust
from tests.server.test_dropouts import losing

SERVER = ("global_model", "centres", "assignment", "participated", "active", "codes", "projection", "round")
AWAY = Undelivered("the node is away")
SMALL = ("--data.num_clients=10", "--trainer.rounds=3", "--trainer.clients_per_round=4", "--trainer.evaluate_every=2")
SMALL += ("--trainer.devices=1", "--trainer.enable_progress_bar=false", "--trainer.logger=false")
OWN = NEEDS | {"lg_fedavg": ("--method.exchange.global_layers=1",)}


def assert_same_state(one, other):
    for name in SERVER:
        a, b = getattr(one, name), getattr(other, name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name


def assert_same_server(one, other):
    """Asserts that the servers of two runs know the same, and that all rows and final metrics are equal."""
    assert_same_state(one.state, other.state)
    assert one.state.total_bytes == other.state.total_bytes
    assert_same_rows(one, other)


def assert_same_rows(one, other):
    for a, b in zip(one.rows, other.rows, strict=True):
        assert_same_numbers(timeless(a), timeless(b))
    assert_same_numbers(one.metrics, other.metrics)


def timeless(row):
    """Returns a row without seconds, and without the index that needs the true groups, which no fleet knows."""
    return {name: value for name, value in row.items() if not name.startswith("time/") and name != "cluster/ari"}


def assert_same_numbers(one, other):
    assert one.keys() == other.keys()
    assert not [name for name in one if not np.array_equal(one[name], other[name], equal_nan=True)]


def first_of_round_1():
    """Returns the first client that is drawn for round 1."""
    return Schedule(4, 4, 2).sample(3, 1, torch.ones(6, dtype=torch.bool))[0]


def dropped(watch):
    return [row.get("train/dropped_clients", 0) for row in watch.rows]


def settings(method):
    return [*map(str, SYNTHETIC), "-c", str(method), *SMALL, *OWN.get(method.stem, ())]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in ("fedclust", "ifca", "lcfed") else [pytest.mark.slow])
        for path in METHODS
    ],
)
def test_the_same_yaml_gives_the_same_bits_on_a_fleet(here, method):
    words = settings(method)
    simulation = federated_cli.main(["fit", *words, "--trainer.name=simulation"])
    write_app(here / "app", words)
    config = here / "app" / "config.yaml"

    def node(place):
        own = {"data": str(here / "app/config.yaml"), "state": str(here / f"node{place}"), "client": place}
        return node_of(config, own)

    link = Loopback({FIRST + place: partial(node, place) for place in range(10)})
    options = options_of(config, {"min-answers": 1.0})
    run = server.fit(instantiate_trainer(config), *instantiate(config), link, options)
    assert_same_state(run.state, simulation.state)
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


def losses():
    """Yields every fate of an answer with every method. All fates with LCFed are fast, and one with two others."""
    fates = (AWAY, lambda answer: Parcel("nonsense"), lambda answer: replace(answer, arrays=answer.arrays[1:]))
    for fate, method in product(fates, (fedavg, lcfed, fedper, fedrep, fedbabu, alone)):
        if method is alone and fate is not AWAY:
            continue  # its answers have no arrays
        is_fast = method is lcfed or (fate is AWAY and method in (fedavg, fedper))
        yield pytest.param(fate, method, marks=[] if is_fast else [pytest.mark.slow])


@pytest.mark.parametrize(("fate", "method"), losses())
def test_with_enough_patience_a_lost_answer_changes_no_bit(tmp_path, monkeypatch, fate, method):
    monkeypatch.setattr("lcfl.fleet.post.AGAIN", 0.01)
    faults = dict.fromkeys((8, 12, 13, 20), fate)
    link = Loopback(nodes(tmp_path, method), lambda message, count: faults.get(count), restarts=True)
    assert_same_server(on_fleet(tmp_path, method, link=link), simulated(tmp_path / "simulation", method))


@pytest.mark.parametrize("fate", [AWAY, NEVER])
@pytest.mark.parametrize("method", [fedavg, lcfed, fedper])
def test_a_client_without_an_answer_is_dropped_and_stays_as_it_was(tmp_path, monkeypatch, method, fate):
    """A simulation in which the same client drops out of the same round gives the same models."""

    client = first_of_round_1()
    link = Loopback(nodes(tmp_path, method), lambda message, count: fate if is_of_round_1(message, client) else None)
    with pytest.warns(UserWarning, match=rf"^round 1: 1 of 4 clients are left out: {client} \(hospital {client}\): "):
        watch = on_fleet(tmp_path, method, link=link, patience=SOME)
    assert dropped(watch) == [0, 1, 0, 0]
    monkeypatch.setattr(lcfl.federation.session, "Server", losing({(1, client)}))
    without = simulated(tmp_path / "simulation", method)
    assert_same_state(watch.state, without.state)
    assert_same_numbers(watch.metrics, without.metrics)


@pytest.mark.parametrize("method", [fedavg, lcfed, fedper, alone])
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
    assert_same_state(watch.state, whole.state)
    assert watch.state.total_bytes == whole.state.total_bytes
    assert_same_numbers(watch.metrics, whole.metrics)
    assert watch.run.path.name == "version_0"


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
    assert_same_state(watch.state, whole.state)


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


def spoiled(**fields):
    def change(answer):
        header = json.loads(answer.text)
        header["fields"] |= fields
        return replace(answer, text=json.dumps(header))

    return change


def resized(answer):
    """Adds one number to the model."""
    header = json.loads(answer.text)
    header["arrays"][0]["shape"][0] += 1
    return Parcel(json.dumps(header), [answer.arrays[0] + bytes(4)])


def enormous(answer):
    header = json.loads(answer.text)
    header["arrays"][0]["shape"] = [2**39, 2**39]
    return replace(answer, text=json.dumps(header))


BAD_ANSWERS = {
    "another shape": (resized, "the upload was refused: model: got torch.float32 of shape"),
    "an enormous shape": (enormous, "a message that cannot be read: model: got "),
    "too many samples": (spoiled(num_samples=10**6), "it has 1000000 training samples, but joined with"),
    "another nonce": (spoiled(nonce="0" * 16), "the answer to another request was refused"),
    "a reserved name": (spoiled(logged={"comm/down_bytes": 1.0}), "it logs 'comm/down_bytes', which is reserved"),
    "the round": (spoiled(logged={"round": 0.5}), "it logs 'round', which is reserved"),
    "a word as loss": (spoiled(loss="low"), "the answer was refused: loss: got 'low'"),
    "a field more": (spoiled(code="import os"), "the answer was refused: the content: code is missing or unknown"),
    "another version": (
        lambda answer: replace(answer, text=answer.text.replace('"wire": 1', '"wire": 7')),
        "in version 7",
    ),
    "no JSON": (lambda answer: replace(answer, text="gAR9lC4="), "a message that cannot be read"),
    "too large": (lambda answer: replace(answer, arrays=[bytes(10**6)]), "at most 0.5 MiB and"),
}


def test_every_evaluation_without_a_client_says_so(tmp_path):
    """Python shows equal warnings once."""
    client = first_of_round_1()

    def fate(message, count):
        return AWAY if message.kind == "evaluate" and message.fields["client"] == client else None

    with pytest.warns(UserWarning) as caught:
        on_fleet(tmp_path, fedavg, link=Loopback(nodes(tmp_path, fedavg), fate), patience=SOME, evaluate_every=1)
    said = {str(each.message).partition(":")[0] for each in caught if "evaluation" in str(each.message)}
    assert said >= {"evaluation after 1 rounds", "evaluation after 2 rounds"}


@pytest.mark.parametrize("bad", BAD_ANSWERS)
def test_a_bad_answer_is_refused_in_words_and_the_run_goes_on(tmp_path, bad):
    client = first_of_round_1()
    change, words = BAD_ANSWERS[bad]
    link = Loopback(nodes(tmp_path, lcfed), lambda message, count: change if is_of_round_1(message, client) else None)
    with pytest.warns(UserWarning, match=re.escape(words)):
        watch = on_fleet(tmp_path, lcfed, link=link, patience=SOME, most_bytes=2**19, rounds=3)
    assert dropped(watch) == [0, 1, 0]


def is_of_round_1(message, client):
    told = message.fields
    return message.kind == "train" and told["round"] == 1 and told["client"] == client


def test_an_answer_with_nan_counts_as_failed(tmp_path):
    def nan(answer):
        return replace(answer, arrays=[np.full(len(answer.arrays[0]) // 4, np.nan, dtype="<f4").tobytes()])

    link = Loopback(
        nodes(tmp_path, lcfed),
        lambda message, count: nan if message.kind == "train" and message.fields["round"] == 1 else None,
    )
    with pytest.warns(UserWarning, match=r"round 1: the loss or the upload of 4 of 4 clients is not finite"):
        watch = on_fleet(tmp_path, lcfed, link=link)
    assert [row["train/failed_clients"] for row in watch.rows] == [0, 4, 0, 0]


def test_an_old_request_that_arrives_late_changes_nothing(tmp_path):
    """Each node answers its first request once more at the end of every round."""
    old = {}

    class Late(Loopback):
        def send(self, parcels):
            tickets = super().send(parcels)
            for number, parcel in parcels.items():
                if number in old:
                    self.made[number]().answer(decode(old[number], 2**30))
                if json.loads(parcel.text)["kind"] == "train":
                    old.setdefault(number, parcel)
            return tickets

    watch = on_fleet(tmp_path, fedper, link=Late(nodes(tmp_path, fedper)))
    assert_same_server(watch, simulated(tmp_path / "simulation", fedper))


@pytest.mark.parametrize("method", [fedavg, lcfed, fedper, fedclust])
def test_a_node_that_registers_during_the_run_is_added_by_the_rule_of_the_method(tmp_path, method):
    """It is added between two rounds as ``lcfl onboard`` adds it to the checkpoint of a simulation."""
    more = {"newcomers": 1}
    (newcomer,) = data(newcomers=1).newcomer_clients
    engine = {"engine": "auto"}  # that of lcfl onboard
    made = nodes(tmp_path, method, **engine)
    made = {node: partial(each, section=partial(data, newcomers=1)) for node, each in made.items()}
    link = Loopback(made, away=[FIRST + newcomer])

    class Registering(Callback):
        def on_round_start(self, state):
            if state.round == 3:
                link.away.clear()

    watch = on_fleet(tmp_path, method, link=link, callbacks=[Registering()], more=more, **engine)
    simulation = tmp_path / "simulation"
    whole = simulated(simulation, method, data=data(newcomers=1), callbacks=[Checkpoint(every_n_rounds=1)], **engine)
    assert_same_server(watch, whole)
    path = simulation / "run/version_0/checkpoints/round-000004.ckpt"
    by_hand = onboard(path, module(), data(newcomers=1), method(), accelerator="cpu", keep_weights=True)
    found = json.loads((watch.run.path / "newcomers.json").read_text())
    expected = by_hand.evaluation.summary()
    assert found["metrics"] == expected and found["rule"] == by_hand.rule
    assert found["newcomers"][0]["cluster"] == by_hand.joined[0].cluster
    assert found["newcomers"][0]["name"] == f"hospital {newcomer}"
    (kept,) = tmp_path.glob(f"node{newcomer}/*/client-{newcomer}/newcomer.pt")
    assert_same_numbers(torch.load(kept, weights_only=True), by_hand.weights[newcomer])


@pytest.mark.parametrize(("newcomers", "words"), [(0, "data.num_clients counts them"), (1, "it may join")])
def test_a_node_for_which_there_is_no_place_is_named(tmp_path, caplog, newcomers, words):
    made = nodes(tmp_path, fedavg, num_clients=7)
    caplog.set_level("INFO", "lcfl")
    free = 6 - newcomers
    with pytest.warns(UserWarning, match=rf"\(node 1006\) is left out: all {free} places are taken; {words}"):
        on_fleet(tmp_path, fedavg, link=Loopback(made), more={"newcomers": newcomers}, rounds=1)
    assert f"{free} of {free} clients are there" in caplog.text


def test_data_that_have_grown_do_not_stop_a_run_from_being_resumed(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        on_fleet(tmp_path, lcfed, callbacks=[Checkpoint(every_n_rounds=1), Stop(2)])
    grown = partial(data, dataset=Synthetic(samples_per_class=80))
    made = {each: partial(one, section=grown) for each, one in nodes(tmp_path, lcfed).items()}
    with pytest.warns(UserWarning, match="hospital 0: its data have changed since it joined"):
        watch = on_fleet(tmp_path, lcfed, link=Loopback(made), callbacks=[Checkpoint()], ckpt_path="last")
    assert watch.state.round == 4 and dropped(watch) == [0, 0]


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_no_round_waits_for_a_newcomer_without_end(tmp_path, kind):
    (newcomer,) = data(newcomers=1).newcomer_clients
    made = {node: partial(each, section=partial(data, newcomers=1)) for node, each in nodes(tmp_path, fedclust).items()}
    link = Loopback(
        made, lambda message, count: NEVER if message.kind == kind and message.fields["client"] == newcomer else None
    )
    link.away = {FIRST + newcomer}

    class Registering(Callback):
        def on_round_start(self, state):
            if state.round == 2:
                link.away.clear()

    with pytest.warns(UserWarning, match=rf"round \d: hospital {newcomer}: newcomer {newcomer}: no answer"):
        watch = on_fleet(
            tmp_path,
            fedclust,
            link=link,
            callbacks=[Registering()],
            more={"newcomers": 1},
            patience=replace(SOME, min_answers=1.0),
        )
    assert watch.state.round == 4 and not (watch.run.path / "newcomers.json").exists()


@pytest.mark.parametrize(("least_work", "times"), [(1e9, 1), (0, 3)])
def test_rounds_go_on_before_a_silent_node_is_asked_again(tmp_path, monkeypatch, least_work, times):
    """A node that registers and does not answer holds up a round until the deadline."""
    monkeypatch.setattr("lcfl.fleet.newcomers.AGAIN", 0.0)
    monkeypatch.setattr("lcfl.fleet.newcomers.LEAST_WORK", least_work)
    (newcomer,) = data(newcomers=1).newcomer_clients
    made = {node: partial(each, section=partial(data, newcomers=1)) for node, each in nodes(tmp_path, fedavg).items()}
    link = Loopback(made, lambda message, count: NEVER if message.kind == "join" and not link.away else None)
    link.away = {FIRST + newcomer}

    class Registering(Callback):
        def on_round_start(self, state):
            if state.round == 1:
                link.away.clear()

    patience = replace(SOME, min_answers=1.0)
    with pytest.warns(UserWarning, match=rf"node {FIRST + newcomer} has not joined yet: no answer within 0.2 s"):
        on_fleet(tmp_path, fedavg, link=link, callbacks=[Registering()], more={"newcomers": 1}, patience=patience)
    kinds = [json.loads(parcel.text)["kind"] for node, parcel, _ in link.sent if node == FIRST + newcomer]
    assert kinds == ["join"] * times


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
