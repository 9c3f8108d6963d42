"""Keeps a node of a fleet between two messages: ``python -m lcfl.cli.flower_node CONFIG SETTINGS SOCKET PROCESS``."""

import json
import sys
import time
from pathlib import Path

import torch

from lcfl.cli.fleet_config import MIB, node_of
from lcfl.core.validation import shortened
from lcfl.fleet.messages import decode, encode
from lcfl.fleet.node import Node
from lcfl.fleet.parcel import MessageError, Parcel, refusal
from lcfl.fleet.relay import keep

__all__ = ["main"]

# Seconds after which a node that is asked to join reads its data anew, because they may have been corrected. It is more
# than the half minute until it is asked again, or a node that reads for longer than the deadline would never answer.
# The old data stay in memory until the new ones have been read.
FRESH = 45.0


def main(config: str, settings: str, place: str, needed_by: str) -> None:
    """Answers messages until nobody needs it any more.

    Args:
        config: the configuration of the run.
        settings: what the node decides itself, as JSON.
        place: the path of the socket.
        needed_by: the number of the process that needs the answers.
    """
    torch.set_num_threads(1)  # as every rank of a simulation, because the number of threads changes bits
    sys.path.insert(0, str(Path(config).parent))  # the run's own modules
    own = json.loads(settings)

    def read() -> tuple[Node, float]:
        try:
            return node_of(Path(config), own), time.monotonic()
        except Exception as error:
            words = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
            raise MessageError(shortened(words).replace("\n", " ")) from error

    try:
        node, since = read()
    except MessageError as error:
        sys.exit(str(error))
    most_bytes = int(own.get("max-message-mib", 1024)) * MIB

    def answer(parcel: Parcel) -> Parcel:
        nonlocal node, since
        try:
            message = decode(parcel, most_bytes)
            if message.kind == "join" and time.monotonic() - since > FRESH:
                node, since = read()
            return encode(node.answer(message))
        except MessageError as error:
            return refusal(parcel, str(error))

    keep(place, int(needed_by), answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
