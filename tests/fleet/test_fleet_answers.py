"""Answers that are lost, late or bad: a fleet asks again, or goes on without the client."""

import json
import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lcfl
import lcfl.federation.session
from lcfl.fleet.messages import Message, decode
from lcfl.fleet.parcel import Parcel
from lcfl.fleet.post import _Asking
from lcfl.server.schedule import Schedule
from tests.fleet.fleets import (
    AWAY,
    FIRST,
    SOME,
    assert_same_fields,
    assert_same_numbers,
    assert_same_server,
    dropped,
    nodes,
    on_fleet,
    simulated,
)
from tests.helpers.builders import alone, fedavg, fedbabu, fedper, fedrep, lcfed
from tests.helpers.loopback import NEVER, Loopback
from tests.server.test_dropouts import losing


def first_of_round_1():
    """Returns the first client that is drawn for round 1."""
    return Schedule(4, 4, 2).sample(3, 1, torch.ones(6, dtype=torch.bool))[0]


def losses():
    """Yields every fate of an answer with every method. One fate is fast, with three methods."""
    fates = (AWAY, lambda answer: Parcel("nonsense"), lambda answer: replace(answer, arrays=answer.arrays[1:]))
    for fate, method in product(fates, (fedavg, lcfed, fedper, fedrep, fedbabu, alone)):
        if method is alone and fate is not AWAY:
            continue  # its answers have no arrays
        is_fast = fate is AWAY and method in (fedavg, fedper, lcfed)
        yield pytest.param(fate, method, marks=[] if is_fast else [pytest.mark.slow])


@pytest.mark.parametrize(("fate", "method"), list(losses()))
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
    assert_same_fields(watch.state, without.state)
    assert_same_numbers(watch.metrics, without.metrics)


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


@pytest.mark.filterwarnings("error:.*was refused")
def test_a_loss_may_be_undefined_for_a_client(tmp_path):
    """As in a simulation: that of samples whose classes all have a weight of 0."""
    client = first_of_round_1()

    def undefined(answer):
        header = json.loads(answer.text)
        for each in (each for sets in header["fields"]["metrics"] for each in sets.values()):
            del each["loss"]
        return replace(answer, text=json.dumps(header))

    def fate(message, count):
        return undefined if message.kind == "evaluate" and message.fields["client"] == client else None

    with pytest.warns(UserWarning, match="^loss: not defined for samples of 1 clients"):
        watch = on_fleet(tmp_path, fedavg, link=Loopback(nodes(tmp_path, fedavg), fate), evaluate_every=1)
    assert watch.state.round == 4


@pytest.mark.parametrize(
    ("answer", "reason"), [(Parcel("nonsense"), "a message that cannot be read"), (AWAY, "no answer")]
)
def test_a_node_that_is_asked_again_is_still_one_whose_answer_was_refused(monkeypatch, answer, reason):
    """A reminder says why the run waits."""
    monkeypatch.setattr("lcfl.fleet.post.AGAIN", 0.0)
    arriving = [{"ticket": answer}, {}]
    link = SimpleNamespace(
        nodes=lambda: [FIRST], send=lambda parcels: {FIRST: "ticket"}, receive=lambda tickets: arriving.pop(0)
    )
    post = SimpleNamespace(link=link, names={}, most_bytes=2**20)
    asking = _Asking(post, {FIRST: Message("trivial", {})}, lambda node, answer: None, is_quiet=True)
    for _ in range(2):
        asking.send()
        asking.receive()
    assert asking.missing("no answer")[FIRST].startswith(reason)


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
