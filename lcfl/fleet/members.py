"""Who takes part in a fleet: nodes join, and each becomes a client with a number that stays the same."""

import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lcfl
from lcfl.core.files import read_regular, write_json
from lcfl.core.schema import Number, check_form
from lcfl.data.spec import SampleSpec
from lcfl.distributed.tasks import Lost
from lcfl.fleet.data import RemoteDataset, differing
from lcfl.fleet.messages import Message
from lcfl.fleet.post import Post, one_line
from lcfl.runs.checkpoint import CheckpointError
from lcfl.runs.directory import MEMBERS

__all__ = ["Admission", "Member", "is_word", "numbered", "read_members", "read_spec", "write_members"]

Fits = Callable[[Mapping[str, Any]], None]
FORM = {
    "run": str,
    "members": {
        str: {
            "node": int,
            "name": str,
            "sizes": {str: Number(int, 0)},
            "spec": dict,
            "fingerprint": str,
            "wanted": (Number(int, 0), None),
        }
    },
}


@dataclass(frozen=True)
class Member:
    """A client of the fleet.

    Attributes:
        node: the node that is the client.
        name: what the client is called.
        sizes: the number of samples in each of its sets, and for ``train``.
        spec: what its samples look like.
        fingerprint: the SHA-256 of its data.
        wanted: the number that it asks for; None for any.
    """

    node: int
    name: str
    sizes: Mapping[str, int]
    spec: Mapping[str, Any]
    fingerprint: str
    wanted: int | None = None


@dataclass(frozen=True)
class Admission:
    """Asks nodes to join.

    Args:
        post: sends the requests.
        sets: the sets of samples that clients are measured on.
        identity: see `lcfl.fleet.node.identity_of`.
        fits: raises a ValueError if the network of the run cannot take samples that look so.
        refused: why nodes have been refused; they are told when they are asked again.
        warned: what has been said of nodes, which is not said twice in a row.
        silent: the nodes that did not answer when they were asked for the last time.
    """

    post: Post
    sets: Sequence[str]
    identity: str
    fits: Fits
    refused: dict[int, str] = field(default_factory=dict)
    warned: dict[int, str] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)

    def ask(self, nodes: Collection[int], known: Collection[Member] = ()) -> list[Member]:
        """Returns those of the nodes that fit. The others are refused with a warning that says why.

        Args:
            nodes: the nodes to ask.
            known: who has joined already; the samples of all members must look alike, and their names must differ.
        """
        asked = {"lcfl": lcfl.__version__, "sets": list(self.sets)}
        requests = {node: Message("join", {**asked, "refused": self.refused.get(node)}) for node in nodes}
        members = list(known)
        answers = self.post.ask(requests, enough=0)
        self.silent.difference_update(nodes)
        self.silent.update(node for node, answer in answers.items() if isinstance(answer, Lost))
        for node, answer in answers.items():
            if reason := self._reason(answer, members):
                name = answer.fields["name"] if isinstance(answer, Message) else ""
                who = f"{name} (node {node})" if is_word(name) else f"node {node}"
                if self.warned.get(node) != reason:
                    how = "has not joined yet" if isinstance(answer, Lost) else "does not take part"
                    warnings.warn(f"{who} {how}: {reason.rstrip('.')}.", stacklevel=2)
                self.warned[node] = reason
                if isinstance(answer, Message):
                    self.refused[node] = self._reason(answer, members, is_for_node=True)
                continue
            assert isinstance(answer, Message), "there is an answer"
            told = answer.fields
            members.append(Member(node, told["name"], told["sizes"], told["spec"], told["fingerprint"], told["client"]))
        return members[len(known) :]

    def _reason(self, answer: Message | Lost, members: Collection[Member], is_for_node: bool = False) -> str:
        """Returns why a node cannot take part; empty if it can. What a node is told names no other node."""
        if isinstance(answer, Lost):
            return answer.reason
        told = answer.fields
        if told["lcfl"] != lcfl.__version__:
            return f"it has lcfl {one_line(told['lcfl'])}, and the server {lcfl.__version__}; install the same version"
        if told["identity"] != self.identity:
            return "it has another network, method or version of torch or lightning than the server; compare both"
        if not is_word(told["name"]):
            return f"its name, {told['name']!r:.40}, must have 1 to 100 printable signs"
        try:
            self.fits(told["spec"])
        except ValueError as error:
            return f"its samples do not fit: {one_line(str(error))}"
        if set(told["sizes"]) != {"train", *self.sets} or told["sizes"]["train"] < 1:
            return f"it has samples in {one_line(', '.join(told['sizes']))}; it must have some in train"
        for member in members:
            if names := differing(told["spec"], member.spec):
                if is_for_node:
                    return (
                        f"its samples look different from those of other nodes, in {', '.join(names)}; ask the "
                        "operator, and change the data section"
                    )
                pairs = "; ".join(f"{name}: {told['spec'][name]}, and {member.spec[name]} there" for name in names)
                return f"its samples look different from those of {member.name} ({pairs}); change its data section"
            if member.name == told["name"]:
                return (
                    f"its name {member.name} is taken by another node of the run; give it another one. If it is that "
                    "node, restarted without keys: Flower knows it only by its keys, so it cannot come back"
                )
        return ""


def is_word(text: str) -> bool:
    """Returns whether a name from another machine may be printed and written into tables."""
    return 0 < len(text) <= 100 and text.isprintable()


def numbered(members: Collection[Member], free: Collection[int]) -> dict[int, Member]:
    """Returns the members by number: the number that a member asks for, and otherwise in the order of their names.

    Args:
        members: those without a number.
        free: the numbers to give; one that is asked for and not free is ignored.
    """
    left, numbers = sorted(free), {}
    for member in sorted(members, key=lambda each: each.name):
        if member.wanted in left:
            numbers[member.wanted] = member
            left.remove(member.wanted)
    others = [each for each in sorted(members, key=lambda each: each.name) if each not in numbers.values()]
    return numbers | dict(zip(left, others, strict=False))


def write_members(folder: Path, run: str, members: Mapping[int, Member]) -> None:
    """Writes who the clients of a run are into its directory: ``fleet.json``."""
    content = {str(number): asdict(member) for number, member in sorted(members.items())}
    write_json(folder / MEMBERS, {"run": run, "members": content}, indent=2)


def read_members(folder: Path) -> tuple[str, dict[int, Member]]:
    """Returns the identifier of a run and its clients by number.

    Raises:
        CheckpointError: if the run was not one of a fleet, or the file is damaged.
    """
    path = folder / MEMBERS
    try:
        content = json.loads(read_regular(path))
        check_form("", content, FORM, {})
        return content["run"], {int(number): Member(**each) for number, each in content["members"].items()}
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not the run of a fleet: it has no {MEMBERS}.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged: {error}.") from None


def read_spec(folder: Path) -> SampleSpec:
    """Returns what the samples of a fleet's run look like, which are alike on all its nodes.

    Raises:
        CheckpointError: if the run was not one of a fleet, or the file is damaged.
    """
    _, members = read_members(folder)
    return RemoteDataset(next(iter(members.values())).spec).spec
