"""Carries messages through Flower's deployment runtime: SuperLink, SuperNodes, and the app that runs on them."""

from collections.abc import Collection, Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from lcfl.fleet.link import Undelivered
from lcfl.fleet.parcel import MessageError, Parcel

__all__ = ["FlowerLink", "packed", "unpacked"]

TEXT, ARRAYS = "text", "arrays"
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
        """See `lcfl.fleet.link.Link.receive`."""
        try:
            messages = list(self._grid.pull_messages(tickets))
        except (ValueError, TypeError, KeyError) as error:  # Flower reads what a node sent before lcfl can check it
            if len(tickets) == 1:
                return dict.fromkeys(tickets, Undelivered(f"the answer cannot be read ({error})"))
            return {each: answer for ticket in tickets for each, answer in self.receive([ticket]).items()}
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
        more = "" if message.error.code == 5 else f" ({(message.error.reason or '')[:200]})"
        return Undelivered(reason + more)
    try:
        return unpacked(message.content)
    except MessageError as error:
        return Undelivered(str(error))
