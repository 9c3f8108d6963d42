"""Asks nodes and waits for their answers: with a deadline, a minimum of answers, and nodes that are away."""

import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from secrets import token_hex

from lcfl.core.schema import check_form
from lcfl.core.validation import abbreviated, shortened
from lcfl.distributed.tasks import Lost
from lcfl.fleet.link import Link, Undelivered
from lcfl.fleet.messages import Message, decode, encode
from lcfl.fleet.node import ANSWERS
from lcfl.fleet.parcel import MessageError, Parcel

__all__ = ["Check", "Patience", "Post", "one_line"]

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
        if not share and not isinstance(self.min_answers, int):
            raise ValueError(f"min-answers: got {self.min_answers!r}; it must be a number (8) or a share (0.5).")
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
        names: what nodes are called in messages, by their numbers.
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

        Raises:
            InterruptedError: if the run is asked to stop and there cannot be enough answers.
        """
        enough = self.patience.enough(len(requests)) if enough is None else enough
        asking = _Asking(self, requests, check, is_quiet=not enough)
        begin = reminded = time.monotonic()
        is_late, pause = False, SHORTEST_WAIT
        while not asking.is_complete:
            asking.send()
            has_arrived = asking.receive()
            seconds = time.monotonic() - begin
            is_late = seconds > self.patience.deadline
            is_over = is_late or not asking.waiting
            if len(asking.answers) >= enough and (is_over or (not enough and self.stopped())):
                break
            if is_over and self.stopped():
                raise InterruptedError(
                    "the run was asked to stop, and there are too few answers to complete the round. It can be resumed "
                    "from its last checkpoint."
                )
            if is_late and time.monotonic() - reminded > REMINDER:
                reminded = time.monotonic()
                self._remind(len(asking.answers), enough, seconds, asking.missing("no answer"))
            pause = SHORTEST_WAIT if has_arrived else min(1.2 * pause, LONGEST_WAIT)
            time.sleep(pause)
        why = f"no answer within {self.patience.deadline:g} s" if is_late else "no answer before the run was stopped"
        missing = {node: Lost(reason) for node, reason in asking.missing(why).items()}
        return {node: asking.answers[node] if node in asking.answers else missing[node] for node in requests}

    def _remind(self, arrived: int, enough: int, seconds: float, missing: Mapping[int, str]) -> None:
        """Warns that the run still waits, and for whom."""
        said = abbreviated(f"{self.names.get(node, node)}: {reason}" for node, reason in missing.items())
        warnings.warn(
            f"{arrived} of at least {enough} answers have arrived in {seconds:.0f} s. The run waits ({said}).",
            stacklevel=3,
        )


def one_line(text: str) -> str:
    """Returns a text from another machine so that it can be printed."""
    return shortened("".join(sign if sign.isprintable() else " " for sign in text), 500)


class _Asking:
    """What has become of some requests so far.

    Attributes:
        answers: the answers that were accepted, by node.
        waiting: the nodes whose answers are on their way, by ticket.
    """

    def __init__(self, post: Post, requests: Mapping[int, Message], check: Check, is_quiet: bool) -> None:
        self.answers: dict[int, Message] = {}
        self.waiting: dict[str, int] = {}
        self._post, self._check, self._is_quiet = post, check, is_quiet
        self._requests = {
            node: replace(each, fields={"nonce": token_hex(8)} | dict(each.fields)) for node, each in requests.items()
        }
        self._lost: dict[int, str] = {}
        self._refused: set[int] = set()  # nodes whose answers were refused, or that refuse
        self._again = dict.fromkeys(requests, 0.0)  # when a node may be asked

    @property
    def is_complete(self) -> bool:
        """Whether all nodes have answered."""
        return len(self.answers) == len(self._requests)

    def missing(self, otherwise: str) -> dict[int, str]:
        """Returns why each of the other nodes has not answered; `otherwise` if nothing went wrong with it."""
        return {node: self._lost.get(node, otherwise) for node in self._requests if node not in self.answers}

    def send(self) -> None:
        """Sends the requests whose time has come to the nodes that can be reached."""
        now, busy = time.monotonic(), set(self.waiting.values())
        ready = [node for node in self._requests if node not in self.answers and node not in busy]
        ready = [node for node in ready if self._again[node] <= now]
        if not ready:
            return
        reachable = set(self._post.link.nodes())
        for node in ready:
            if node not in reachable:
                self._lose(node, "it cannot be reached", LONGEST_WAIT)
        parcels = {node: encode(self._requests[node]) for node in ready if node in reachable}
        for node, ticket in (self._post.link.send(parcels) if parcels else {}).items():
            if ticket is None:
                self._lose(node, "the request could not be sent", AGAIN)
            else:
                if node not in self._refused:  # whose next answer will hardly be better
                    self._lost.pop(node, None)
                self.waiting[ticket] = node

    def receive(self) -> bool:
        """Takes the answers that have arrived; returns whether there were any."""
        arrived = self._post.link.receive(list(self.waiting)) if self.waiting else {}
        for ticket, parcel in arrived.items():
            node = self.waiting.pop(ticket)
            try:
                answer = self._read(self._requests[node], parcel)
                self._check(node, answer)
                self.answers[node] = answer
            except MessageError as error:
                if not self._is_quiet:  # the run may wait long for another answer
                    LOGGER.info("%s: %s", self._post.names.get(node, f"node {node}"), error)
                if not isinstance(parcel, Undelivered):
                    self._refused.add(node)
                self._lose(node, str(error), AGAIN)
        return bool(arrived)

    def _lose(self, node: int, reason: str, seconds: float) -> None:
        self._lost[node], self._again[node] = reason, time.monotonic() + seconds

    def _read(self, request: Message, parcel: Parcel | Undelivered) -> Message:
        """Returns the answer to a request.

        Raises:
            MessageError: if it was lost, is no answer to this request, or says that the node refuses.
        """
        if isinstance(parcel, Undelivered):
            raise MessageError(parcel.reason)
        message = decode(parcel, self._post.most_bytes)
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
            raise MessageError(f"the node says: {one_line(told['reason']).rstrip('.')}")
        return replace(message, fields=told)
