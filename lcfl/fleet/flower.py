"""Carries messages through Flower's deployment runtime: SuperLink, SuperNodes, and the app that runs on them."""

import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from lcfl.fleet.link import Undelivered
from lcfl.fleet.parcel import MessageError, Parcel

__all__ = ["FlowerLink", "packed", "unpacked"]

TEXT, ARRAYS = "text", "arrays"
THREADS = 32  # at most, that pull answers at the same time
LONGEST_PULL = 1.0  # seconds that are waited for them at a time
REASONS = {
    1: "the node could not load the app",
    2: "the app failed on the node",
    3: "the request was lost",
    4: "the answer was lost",
    5: "the node is away",
    7: "the node refused the app",
    8: "the app crashed on the node, or the node was restarted",
}


class FlowerLink:
    """The nodes of a Flower federation, as a `lcfl.fleet.link.Link`.

    Args:
        grid: what Flower gives to the main function of a ServerApp.
        ttl: seconds after which Flower gives a message up.
    """

    def __init__(self, grid: Grid, ttl: float) -> None:
        self._grid, self._ttl = grid, ttl
        self._pulled_by: dict[str, _Pull] = {}  # the pulls that are under way, by ticket

    def nodes(self) -> list[int]:
        """See `lcfl.fleet.link.Link.nodes`. Flower notices after about a minute that a node is away."""
        return list(self._grid.get_node_ids())

    def send(self, parcels: Mapping[int, Parcel]) -> dict[int, str | None]:
        """See `lcfl.fleet.link.Link.send`. Flower carries arrays that several nodes get only once."""
        messages = [
            Message(packed(parcel), dst_node_id=node, message_type=MessageType.QUERY, ttl=self._ttl)
            for node, parcel in parcels.items()
        ]
        tickets = iter(self._grid.push_messages(messages))
        return {node: next(tickets, None) or None for node in parcels}  # Flower's ticket is empty for what it refuses

    def receive(self, tickets: Collection[str]) -> dict[str, Parcel | Undelivered]:
        """See `lcfl.fleet.link.Link.receive`.

        Flower waits for an answer that has begun to arrive, which takes minutes on a slow link. Answers are therefore
        pulled in threads, and only those that come by the same thread wait with it.
        """
        idle = [ticket for ticket in tickets if ticket not in self._pulled_by]
        pulls = [_Pull(self._grid, idle[place::THREADS]) for place in range(min(THREADS, len(idle)))]
        self._pulled_by |= {ticket: pull for pull in pulls for ticket in pull.tickets}
        end = time.monotonic() + LONGEST_PULL
        for pull in pulls:
            pull.join(max(0.0, end - time.monotonic()))
        done = {pull for pull in self._pulled_by.values() if not pull.is_alive()}
        self._pulled_by = {ticket: pull for ticket, pull in self._pulled_by.items() if pull not in done}
        answers = {ticket: answer for pull in done for ticket, answer in pull.answers.items()}
        return {ticket: answer for ticket, answer in answers.items() if ticket in tickets}


class _Pull(threading.Thread):
    """Pulls the answers to some tickets that have arrived.

    If this fails, the next `receive` pulls them again. A connection that is gone for good is noticed when the nodes are
    listed to ask them again.

    Attributes:
        tickets: the tickets.
        answers: the answers by ticket, after the thread has ended.
    """

    def __init__(self, grid: Grid, tickets: Collection[str]) -> None:
        super().__init__(daemon=True)  # the process does not wait for it
        self.tickets = tickets
        self.answers: dict[str, Parcel | Undelivered] = {}
        self._grid = grid
        self.start()

    def run(self) -> None:
        """Pulls."""
        with suppress(Exception):  # of any kind, such as that of the connection: the next `receive` tries again
            self.answers = self._pulled(self.tickets)

    def _pulled(self, tickets: Collection[str]) -> dict[str, Parcel | Undelivered]:
        try:
            messages = list(self._grid.pull_messages(tickets))
        except (ValueError, TypeError, KeyError) as error:  # Flower reads what a node sent before lcfl can check it
            if len(tickets) == 1:
                return dict.fromkeys(tickets, Undelivered(f"the answer cannot be read ({error})"))
            return {each: answer for ticket in tickets for each, answer in self._pulled([ticket]).items()}
        return {message.metadata.reply_to_message_id: _parcel(message) for message in messages}


def packed(parcel: Parcel) -> RecordDict:
    """Returns a parcel as the content of one of Flower's messages."""
    arrays = {
        str(number): Array(dtype="uint8", shape=(len(content),), stype="bytes", data=content)
        for number, content in enumerate(parcel.arrays)
    }
    return RecordDict({TEXT: ConfigRecord({TEXT: parcel.text}), ARRAYS: ArrayRecord(arrays)})


def unpacked(content: RecordDict) -> Parcel:
    """Returns the parcel in the content of one of Flower's messages.

    Raises:
        MessageError: if it holds something else.
    """
    texts, arrays = content.get(TEXT), content.get(ARRAYS)
    text = texts.get(TEXT) if isinstance(texts, ConfigRecord) else None
    if not isinstance(text, str) or not isinstance(arrays, ArrayRecord):
        raise MessageError("a message of another app.")
    return Parcel(text, [array.data for array in arrays.values()])


def _parcel(message: Message) -> Parcel | Undelivered:
    if message.has_error():
        reason = REASONS.get(message.error.code, f"Flower's error {message.error.code}")
        more = "" if message.error.code == 5 else f" ({(message.error.reason or '')[:200].rstrip('.')})"
        return Undelivered(reason + more)
    try:
        return unpacked(message.content)
    except MessageError as error:
        return Undelivered(str(error))
