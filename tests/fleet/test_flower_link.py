"""Answers that Flower pulls: a slow one holds up no other, and an unreadable one is lost alone."""

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")
from lcfl.fleet import flower
from lcfl.fleet.flower import FlowerLink, packed
from lcfl.fleet.link import Undelivered
from lcfl.fleet.parcel import Parcel


class Arrived:
    """A grid at which answers have arrived; each can be pulled only once, as from Flower."""

    def __init__(self, *tickets, slow=(), unreadable=()):
        self.there, self.slow, self.unreadable = set(tickets), set(slow), set(unreadable)
        self.complete = threading.Event()

    def pull_messages(self, tickets):
        taken = [ticket for ticket in tickets if ticket in self.there]
        if self.unreadable.intersection(taken):
            raise ValueError("no arrays")
        self.there -= set(taken)
        if self.slow.intersection(taken):
            assert self.complete.wait(60)
        return [self.message(ticket) for ticket in taken]

    def message(self, ticket):
        metadata = SimpleNamespace(reply_to_message_id=ticket)
        return SimpleNamespace(metadata=metadata, has_error=lambda: False, content=packed(Parcel(ticket, [])))


def test_a_slow_answer_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(flower, "LONGEST_PULL", 0.05)
    grid = Arrived("a", "b", slow="b")
    link, tickets = FlowerLink(grid, 60), ["a", "b", "c"]
    assert set(link.receive(tickets)) == {"a"}
    grid.there.add("c")
    assert set(link.receive(["b", "c"])) == {"c"}
    assert link.receive(["b"]) == {}
    grid.complete.set()
    link._pulled_by["b"].join(60)
    assert link.receive(["b"]) == {"b": Parcel("b", [])}
    assert link.receive(["b"]) == {}


def test_an_answer_that_nobody_waits_for_any_more_is_dropped(monkeypatch):
    monkeypatch.setattr(flower, "LONGEST_PULL", 0.05)
    grid = Arrived("late", slow=["late"])
    link = FlowerLink(grid, 60)
    assert link.receive(["late"]) == {}
    grid.complete.set()
    link._pulled_by["late"].join(60)
    grid.there.add("new")
    assert set(link.receive(["new"])) == {"new"} and not link._pulled_by


def test_an_error_in_a_pull_that_nobody_waits_for_any_more_is_dropped(monkeypatch):
    monkeypatch.setattr(flower, "LONGEST_PULL", 0.05)
    broken = threading.Event()

    class Breaking(Arrived):
        def pull_messages(self, tickets):
            if "late" in tickets:
                assert broken.wait(60)
                raise ConnectionError("cut off")
            return super().pull_messages(tickets)

    grid = Breaking()
    link = FlowerLink(grid, 60)
    assert link.receive(["late"]) == {}
    broken.set()
    link._pulled_by["late"].join(60)
    grid.there.add("new")
    assert set(link.receive(["new"])) == {"new"} and not link._pulled_by


def test_more_answers_than_threads(monkeypatch):
    monkeypatch.setattr(flower, "THREADS", 2)
    tickets = list("abcdefg")
    assert set(FlowerLink(Arrived(*tickets), 60).receive(tickets)) == set(tickets)


def test_an_unreadable_answer_is_lost_alone(monkeypatch):
    monkeypatch.setattr(flower, "THREADS", 1)
    answers = FlowerLink(Arrived("a", "b", unreadable="b"), 60).receive(["a", "b"])
    assert answers == {"a": Parcel("a", []), "b": Undelivered("the answer cannot be read (no arrays)")}


def test_after_an_error_of_the_connection_answers_are_fetched_again():
    class Breaking(Arrived):
        cut_off = True

        def pull_messages(self, tickets):
            if "a" in tickets and self.cut_off:
                self.cut_off = False
                raise ConnectionError("cut off")
            return super().pull_messages(tickets)

    link = FlowerLink(Breaking("a", "b"), 60)
    assert link.receive(["a", "b"]) == {"b": Parcel("b", [])}
    assert link.receive(["a"]) == {"a": Parcel("a", [])}
