"""Asks nodes and waits for their answers: with a deadline, a minimum of answers, and nodes that are away."""

import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from secrets import token_hex

from lcfl.core.schema import check_form
from lcfl.core.validation import abbreviated
from lcfl.distributed.tasks import Lost
from lcfl.fleet.link import Link, Undelivered
from lcfl.fleet.messages import Message, decode, encode
from lcfl.fleet.node import ANSWERS
from lcfl.fleet.parcel import MessageError, Parcel

__all__ = ["Patience", "Post"]

LOGGER = logging.getLogger(__name__)
SHORTEST_WAIT, LONGEST_WAIT = 0.02, 1.0  # seconds between two looks for answers
AGAIN = 5.0  # seconds until a node is asked again after its answer was lost or refused
REMINDER = 60.0  # seconds between two warnings that answers are still missing

Check = Callable[[int, Message], None]


@dataclass(frozen=True)
class Patience:
    """How long answers are waited for.

    Args:
        deadline: seconds after which a round goes on without the clients that have not answered.
        min_answers: the answers that it waits for all the same, however long that takes: a number (8) or a share (0.8)
            of the clients that were asked.

    Raises:
        ValueError: for values outside their range.
    """

    deadline: float = 600.0
    min_answers: int | float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.deadline < math.inf:
            raise ValueError(f"deadline: got {self.deadline}; it must be a number of seconds above 0.")
        share = isinstance(self.min_answers, float)
        if self.min_answers < (0 if share else 1) or (share and self.min_answers > 1):
            raise ValueError(
                f"min-answers: got {self.min_answers}; it must be a number of answers from 1, or a share in [0.0, 1.0]."
            )

    def enough(self, asked: int) -> int:
        """Returns how many of the answers from so many clients are waited for: at least one."""
        wanted = math.ceil(self.min_answers * asked - 1e-9) if isinstance(self.min_answers, float) else self.min_answers
        return min(max(1, wanted), asked)


class Post:
    """Sends requests to nodes and collects their answers.

    Args:
        link: carries parcels.
        patience: how long answers are waited for.
        most_bytes: the largest answer that is accepted.
        stopped: whether the run is asked to stop.

    Attributes:
        names: what nodes are called in warnings, by their numbers.
    """

    def __init__(self, link: Link, patience: Patience, most_bytes: int, stopped: Callable[[], bool]) -> None:
        self.link, self.patience, self.most_bytes, self.stopped = link, patience, most_bytes, stopped
        self.names: Mapping[int, str] = {}

    def ask(
        self, requests: Mapping[int, Message], enough: int | None = None, check: Check = lambda node, answer: None
    ) -> dict[int, Message | Lost]:
        """Returns the answer of each node, or why there is none.

        A node whose answer was lost or refused is asked again as long as there are not enough answers.

        Args:
            requests: the request to each node. Its ``nonce`` may be given; otherwise it is drawn.
            enough: the number of answers that are waited for even after the deadline; None for what `patience` says.
            check: refuses the answer of a node by raising a MessageError.
        """
        requests = {
            node: replace(each, fields={"nonce": token_hex(8)} | dict(each.fields)) for node, each in requests.items()
        }
        enough = self.patience.enough(len(requests)) if enough is None else enough
        answers: dict[int, Message] = {}
        lost: dict[int, str] = {}
        waiting: dict[str, int] = {}
        again = dict.fromkeys(requests, 0.0)  # when a node may be asked
        begin = reminded = time.monotonic()
        pause = SHORTEST_WAIT
        while len(answers) < len(requests) and not self.stopped():
            now, busy = time.monotonic(), set(waiting.values())
            ready = [node for node in requests if node not in answers and node not in busy and again[node] <= now]
            reachable = set(self.link.nodes()) if ready else set()
            lost |= {node: "it cannot be reached" for node in ready if node not in reachable}
            again |= {node: now + LONGEST_WAIT for node in ready if node not in reachable}
            parcels = {node: encode(requests[node]) for node in ready if node in reachable}
            for node, ticket in (self.link.send(parcels) if parcels else {}).items():
                if ticket is None:
                    lost[node], again[node] = "the request could not be sent", now + AGAIN
                else:
                    waiting[ticket] = node
            arrived = self.link.receive(list(waiting)) if waiting else {}
            for ticket, answer in arrived.items():
                if (sender := waiting.pop(ticket, None)) is None:
                    continue  # nobody waits for it any more
                try:
                    read = self._read(requests[sender], answer)
                    check(sender, read)
                    answers[sender] = read
                except MessageError as error:
                    if lost.get(sender) != str(error):
                        LOGGER.info("no answer from %s yet: %s", self.names.get(sender, sender), error)
                    lost[sender], again[sender] = str(error), time.monotonic() + AGAIN
            late = now - begin > self.patience.deadline
            if len(answers) >= enough and (late or not waiting):
                break
            if late and now - reminded > REMINDER:
                reminded = now
                self._remind(len(answers), enough, now - begin, dict.fromkeys(waiting.values(), "no answer") | lost)
            pause = SHORTEST_WAIT if arrived else min(1.2 * pause, LONGEST_WAIT)
            time.sleep(pause)
        why = "the run was asked to stop" if self.stopped() else f"no answer within {self.patience.deadline:g} s"
        lost = dict.fromkeys(waiting.values(), why) | lost
        return {node: answers.get(node) or Lost(lost.get(node, why)) for node in requests}

    def _remind(self, arrived: int, enough: int, seconds: float, missing: Mapping[int, str]) -> None:
        """Warns that the run still waits, and for whom."""
        said = abbreviated(f"{self.names.get(node, node)}: {reason}" for node, reason in missing.items())
        warnings.warn(
            f"{arrived} of at least {enough} answers have arrived in {seconds:.0f} s. The run waits ({said}).",
            stacklevel=3,
        )

    def _read(self, request: Message, answer: Parcel | Undelivered) -> Message:
        """Returns the answer to a request.

        Raises:
            MessageError: if it was lost, is no answer to this request, or says that the node refuses.
        """
        if isinstance(answer, Undelivered):
            raise MessageError(answer.reason)
        message = decode(answer, self.most_bytes)
        nonce, told = request.fields["nonce"], dict(message.fields)
        if told.pop("nonce", None) != nonce:
            raise MessageError("the answer to another request was refused")
        if message.kind not in (request.kind, "refused"):
            raise MessageError(f"an answer of the kind {message.kind!r:.20} to {request.kind} was refused")
        try:
            check_form("", told, ANSWERS[message.kind], {})
        except ValueError as error:
            raise MessageError(f"the answer was refused: {error}") from None
        if message.kind == "refused":
            raise MessageError(f"the node says: {told['reason']}")
        return replace(message, fields=told)
