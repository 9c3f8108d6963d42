"""Nodes that register during the run of a fleet: they join by the rule of the method, and no round waits for them."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from lcfl.callbacks import Checkpoint
from lcfl.core.callback import Callback
from lcfl.federation.onboarding import onboard
from tests.fleet.fleets import (
    FIRST,
    SOME,
    assert_same_numbers,
    assert_same_server,
    data,
    module,
    nodes,
    on_fleet,
    simulated,
)
from tests.helpers.builders import fedavg, fedper, lcfed
from tests.helpers.loopback import NEVER, Loopback
from tests.methods.clustering.test_one_shot import fedclust


class Registering(Callback):
    """Lets the nodes that are away register at the start of a round."""

    def __init__(self, link, round):
        self.link, self.round = link, round

    def on_round_start(self, state):
        if state.round == self.round:
            self.link.away.clear()


@pytest.mark.parametrize("method", [fedavg, lcfed, fedper, fedclust])
def test_a_node_that_registers_during_the_run_is_added_by_the_rule_of_the_method(tmp_path, method):
    """It is added between two rounds as ``lcfl onboard`` adds it to the checkpoint of a simulation."""
    more = {"newcomers": 1}
    (newcomer,) = data(newcomers=1).newcomer_clients
    engine = {"engine": "auto"}  # that of lcfl onboard
    made = nodes(tmp_path, method, **engine)
    made = {node: partial(each, section=partial(data, newcomers=1)) for node, each in made.items()}
    link = Loopback(made, away=[FIRST + newcomer])

    watch = on_fleet(tmp_path, method, link=link, callbacks=[Registering(link, 3)], more=more, **engine)
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


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_no_round_waits_for_a_newcomer_without_end(tmp_path, kind):
    (newcomer,) = data(newcomers=1).newcomer_clients
    made = {node: partial(each, section=partial(data, newcomers=1)) for node, each in nodes(tmp_path, fedclust).items()}
    link = Loopback(
        made, lambda message, count: NEVER if message.kind == kind and message.fields["client"] == newcomer else None
    )
    link.away = {FIRST + newcomer}

    with pytest.warns(UserWarning, match=rf"round \d: hospital {newcomer}: newcomer {newcomer}: no answer"):
        watch = on_fleet(
            tmp_path,
            fedclust,
            link=link,
            callbacks=[Registering(link, 2)],
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

    patience = replace(SOME, min_answers=1.0)
    with pytest.warns(UserWarning, match=rf"node {FIRST + newcomer} has not joined yet: no answer within 0.2 s"):
        on_fleet(
            tmp_path, fedavg, link=link, callbacks=[Registering(link, 1)], more={"newcomers": 1}, patience=patience
        )
    kinds = [json.loads(parcel.text)["kind"] for node, parcel, _ in link.sent if node == FIRST + newcomer]
    assert kinds == ["join"] * times
