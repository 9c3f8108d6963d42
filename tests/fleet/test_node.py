"""A node keeps its client's states, gives away nothing else, and says what it does."""

import errno
import json
import re
import shutil
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lcfl
from lcfl.callbacks import Checkpoint
from lcfl.data.faults import ScaledUpdate
from lcfl.fleet import states
from lcfl.fleet.members import read_spec
from lcfl.fleet.messages import Message, decode
from lcfl.fleet.node import Node, NodeSettings
from lcfl.fleet.parcel import Parcel, in_words, refusal
from lcfl.fleet.states import Owner, newest_model
from lcfl.runs.result import Run
from tests.fleet.fleets import (
    FIRST,
    SOME,
    Stop,
    assert_same_numbers,
    data,
    module,
    node,
    nodes,
    on_fleet,
    simulated,
)
from tests.helpers.builders import fedavg, fedper, lcfed
from tests.helpers.loopback import Loopback


def test_nodes_keep_only_the_states_that_the_server_may_go_back_to(tmp_path):
    on_fleet(tmp_path, lcfed, callbacks=[Checkpoint(every_n_rounds=1)], rounds=6, clients_per_round=6)
    for place in range(6):
        paths = (tmp_path / f"node{place}").glob("*/client-*/round-*.pt")
        # those that the last two checkpoints need, and that of the last round
        assert sorted(int(path.name.split("-")[1]) for path in paths) == [3, 4, 5]


@pytest.mark.parametrize("method", [fedavg, lcfed, fedper])
def test_nodes_keep_the_models_that_they_have_tested(tmp_path, method):
    assert read_spec(on_fleet(tmp_path, method).run.path) == data().dataset.spec
    simulated(tmp_path / "simulation", method, callbacks=[Checkpoint()])
    run = Run(tmp_path / "simulation/run/version_0", module(), method())
    identity = node(tmp_path, method, 0).identity
    for place in range(6):
        folder, owner = tmp_path / f"node{place}", Owner(identity, place)
        kept = {kind: newest_model(folder, kind, owner) for kind in method().exchange.models}
        for kind in kept.keys() - {"after_local"}:  # which only the node can make
            assert_same_numbers(torch.load(kept[kind]), run.model(kind, client=place).state_dict())
    for other in (Owner(identity, place + 1), Owner("another app", place)):
        with pytest.raises(FileNotFoundError, match=r"no personal model of this app and client; .* in it: none\."):
            newest_model(folder, "personal", other)
    with pytest.raises(FileNotFoundError, match=r"has no newcomer model .* models of theirs in it: (after|cluster)"):
        newest_model(folder, "newcomer", owner)
    with pytest.raises(FileNotFoundError, match="nowhere is no folder; give the folder with the node's states"):
        newest_model(tmp_path / "nowhere", "global", owner)


@pytest.mark.parametrize("kind", ["../../../victim", "/tmp/victim", "round-000003-aaaaaaaaaaaaaaaa", "newcomer"])
def test_a_server_cannot_name_a_file_of_the_node(tmp_path, kind):
    link = Loopback(nodes(tmp_path, fedavg))
    on_fleet(tmp_path, fedavg, link=link, rounds=2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.pt")}
    request = next(
        decode(request, 2**20) for to, request, _ in link.sent if to == FIRST and '"evaluate"' in request.text
    )
    wanted = [{**request.fields["kinds"][0], "kind": kind}]
    answer = node(tmp_path, fedavg, 0).answer(Message("evaluate", {**request.fields, "kinds": wanted}, request.arrays))
    assert answer.kind == "refused" and "never asks for" in answer.fields["reason"]
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.pt")}


def test_a_node_without_the_state_that_the_server_names_says_so(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        on_fleet(tmp_path, fedper, callbacks=[Checkpoint(every_n_rounds=1), Stop(2)])
    for path in (tmp_path / "node0").glob("*/client-*/*.pt"):
        path.unlink()
    with pytest.warns(UserWarning, match=r"the node says: this node has no state round-00000\d-.*nothing"):
        on_fleet(tmp_path, fedper, callbacks=[Checkpoint()], ckpt_path="last", patience=SOME)


def test_a_node_whose_folder_is_lost_begins_anew_if_it_is_told_to(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        on_fleet(tmp_path, fedper, callbacks=[Checkpoint(every_n_rounds=1), Stop(2)], clients_per_round=6)
    shutil.rmtree(tmp_path / "node0")
    made = nodes(tmp_path, fedper)

    def anew():
        node = made[FIRST]()
        node.own = replace(node.own, begins_anew=True)
        return node

    watch = on_fleet(
        tmp_path, fedper, link=Loopback(made | {FIRST: anew}), ckpt_path="last", clients_per_round=6, final_models=[]
    )
    assert watch.state.round == 4 and not any(row.get("train/dropped_clients") for row in watch.rows)
    assert len(list((tmp_path / "node0").glob("*/client-*/*.pt"))) > 0


def test_a_refused_node_is_told_why_when_it_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("lcfl.fleet.server.AGAIN", 0.01)

    def change(answer):
        return replace(answer, text=answer.text.replace(f'"lcfl": "{lcfl.__version__}"', '"lcfl": "0.0.1"'))

    link = Loopback(nodes(tmp_path, fedavg), lambda message, count: change if count == 0 else None)
    with pytest.warns(UserWarning, match=r"hospital 0 \(node 1000\) does not take part: it has lcfl 0\.0\.1"):
        on_fleet(tmp_path, fedavg, link=link, rounds=1)
    asked = [(request, answer) for node, request, answer in link.sent if node == FIRST and '"join"' in request.text]
    first, second = (in_words(*pair) for pair in asked[:2])
    assert re.fullmatch(r"lcfl: join as hospital 0 with \d+ training samples", first)
    assert second.startswith(f"{first}; the server has not let it in: it has lcfl 0.0.1, and the server")


def second_tells(tmp_path, name, value):
    """Returns a link on which the second node's first answer tells something else of its samples."""

    def change(answer):
        header = json.loads(answer.text)
        header["fields"]["spec"][name] = value
        return replace(answer, text=json.dumps(header))

    return Loopback(nodes(tmp_path, fedavg), lambda message, count: change if count == 1 else None)


def test_a_refused_node_is_told_nothing_of_the_others(tmp_path, monkeypatch):
    """The second node first answers that it has other classes than the first."""
    monkeypatch.setattr("lcfl.fleet.server.AGAIN", 0.01)

    link = second_tells(tmp_path, "classes", ["malignant", "benign"])
    with pytest.warns(UserWarning, match="its samples look different from those of hospital 0 .classes: .'malignant'"):
        on_fleet(tmp_path, fedavg, link=link, rounds=1)
    told = [json.loads(request.text)["fields"] for node, request, _ in link.sent if node == FIRST + 1]
    assert told[0]["refused"] is None
    assert told[1]["refused"].startswith("its samples look different from those of other nodes, in classes; ask")
    assert "hospital 0" not in str(told)


def test_a_node_with_other_columns_does_not_take_part(tmp_path, monkeypatch):
    """The second node first answers that it has columns, and the first has none."""
    monkeypatch.setattr("lcfl.fleet.server.AGAIN", 0.01)

    link = second_tells(tmp_path, "columns", ["dose", "age"])
    with pytest.warns(UserWarning, match="its samples look different from those of hospital 0 .columns: "):
        on_fleet(tmp_path, fedavg, link=link, rounds=1)


def test_a_refusal_is_said_once(tmp_path, monkeypatch, recwarn):
    """The second node answers three times with the name of the first."""
    monkeypatch.setattr("lcfl.fleet.server.AGAIN", 0.01)
    asked = []

    def change(answer):
        return replace(answer, text=answer.text.replace("hospital 1", "hospital 0"))

    def fate(message, count):
        if message.kind == "join" and count in (1, 6, 7):  # later only the second node is asked
            asked.append(count)
            return change
        return None

    on_fleet(tmp_path, fedavg, link=Loopback(nodes(tmp_path, fedavg), fate), rounds=1)
    assert len(asked) == 3
    said = [str(each.message) for each in recwarn if "does not take part" in str(each.message)]
    (line,) = said
    assert line.startswith("hospital 0 (node 1001) does not take part: its name hospital 0 is taken by another node")


def test_the_log_of_a_node_says_what_it_was_asked_and_how_it_answered(tmp_path):
    link = Loopback(nodes(tmp_path, fedavg))
    on_fleet(tmp_path, fedavg, link=link, rounds=1)
    lines = {re.sub(r"\d+\.\d{4}", "x", in_words(request, answer)) for _, request, answer in link.sent}
    assert {"lcfl: round 0, train: loss x", "lcfl: round 1, evaluate", "lcfl: trivial baseline"} <= lines
    request = Parcel('{"kind": "train", "fields": {"round": 1}}')
    assert in_words(request, refusal(request, "a\nb")) == "lcfl: round 1, train: refused, because a b"
    assert in_words(Parcel("x"), Parcel("{}")) == "lcfl: a message that cannot be read"


def test_a_node_whose_data_have_grown_says_so(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        on_fleet(tmp_path, fedper, callbacks=[Checkpoint(every_n_rounds=1), Stop(2)], clients_per_round=6)
    made = nodes(tmp_path, fedper)
    joined = []

    def grown():  # after it has joined again
        joined.append(FIRST)
        return node(tmp_path, fedper, 0, section=data if len(joined) == 1 else partial(data, test_fraction=0.1))

    said = r"the node says: this node has \d+ training samples, and had \d+ when it joined: set its data back, or start"
    with pytest.warns(UserWarning, match=said):
        link = Loopback(made | {FIRST: grown}, restarts=True)
        on_fleet(tmp_path, fedper, link=link, ckpt_path="last", patience=SOME, clients_per_round=6)


def test_a_node_that_cannot_keep_its_models_is_measured_all_the_same(tmp_path, monkeypatch, caplog):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(states, "write_json", full)
    run = on_fleet(tmp_path, fedavg, rounds=1)
    assert 0 <= run.metrics["test/own_split/global/acc"] <= 1
    assert "the global model of this evaluation is not kept ([Errno 28] No space left on device)" in caplog.text


def test_a_node_is_one_client_of_its_data(tmp_path):
    with pytest.raises(ValueError, match="client: the data section has 6 clients, but a node is one client"):
        node(tmp_path, fedavg, None)


@pytest.mark.parametrize(
    ("place", "names", "own", "name"),
    [
        (1, ("ash", "birch"), None, "birch"),
        (1, ("ash", "birch"), "elm", "elm"),
        (1, None, None, "client 1"),
        (None, None, None, socket.gethostname()),
    ],
)
def test_the_name_of_a_client(place, names, own, name):
    parts = SimpleNamespace(own=NodeSettings(Path(), own, place), _own_place=place or 0)
    parts._whole = SimpleNamespace(population=SimpleNamespace(names=names))
    assert Node.name.fget(parts) == name


def test_a_node_has_no_faults(tmp_path):
    with pytest.raises(ValueError, match=r"data\.faults: only simulations have them"):
        node(tmp_path, fedavg, 0, section=partial(data, faults=[ScaledUpdate([1])]))
