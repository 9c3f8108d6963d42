"""A link whose nodes live in this process: every parcel is written, read and answered as on a real fleet."""

import functools

from lcfl.fleet.link import Undelivered
from lcfl.fleet.messages import decode, encode

MOST_BYTES = 2**30
NEVER = "never"  # an answer that does not arrive


class Loopback:
    """Carries parcels to nodes in this process.

    Args:
        nodes: makes a node, by its number.
        fault: what becomes of an answer, given the message and how many were sent before: None for nothing, `NEVER`, an
            `Undelivered`, or a function of the answer's parcel.
        away: the nodes that cannot be reached.
        restarts: whether every node is made anew for each message.

    Attributes:
        sent: the number of the node, the request and the answer of every message.
    """

    def __init__(self, nodes, fault=lambda message, count: None, away=(), restarts=False):
        self.made, self.fault, self.away = nodes, fault, set(away)
        self._node = self._made_anew if restarts else functools.cache(self._made_anew)
        self.sent, self._arrived = [], {}

    def nodes(self):
        return [node for node in self.made if node not in self.away]

    def _made_anew(self, node):
        return self.made[node]()

    def send(self, parcels):
        tickets = {}
        for node, parcel in parcels.items():
            message = decode(parcel, MOST_BYTES)
            answer = encode(self._node(node).answer(message))
            fate = self.fault(message, len(self.sent))
            tickets[node] = f"ticket {len(self.sent)}"
            self.sent.append((node, parcel, answer))
            if isinstance(fate, Undelivered):
                answer = fate
            elif callable(fate):
                answer = fate(answer)
            if fate is not NEVER:
                self._arrived[tickets[node]] = answer
        return tickets

    def receive(self, tickets):
        return {ticket: self._arrived.pop(ticket) for ticket in tickets if ticket in self._arrived}
