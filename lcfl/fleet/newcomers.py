"""Nodes that register during a run: each becomes one of the newcomers of ``data.newcomers``."""

import logging
import time
import warnings

from lcfl.core.callback import Callback
from lcfl.core.state import FederationState
from lcfl.federation.onboarding import Onboarding
from lcfl.fleet.data import FleetData
from lcfl.fleet.fleet import FleetRecord
from lcfl.fleet.members import Admission, numbered, write_members
from lcfl.server.server import Server

__all__ = ["Newcomers"]

LOGGER = logging.getLogger(__name__)
AGAIN = 30.0  # seconds until a node that could not be added is tried again
LEAST_WORK = 10  # times as long as rounds have waited for a silent node, they go on before it is tried again


class Newcomers(Callback):
    """Adds nodes that register during a run, between two rounds, by the method's own rule.

    A newcomer changes nothing for the federation. It is placed, gets its model and trains it for some epochs. What it
    reaches is in ``newcomers.json`` and ``newcomers.csv``. A resumed run adds the newcomers that it knows once more.

    Args:
        record: knows the clients.
        admission: asks nodes to join.
        epochs: epochs of personalisation.
    """

    def __init__(self, record: FleetRecord, admission: Admission, epochs: int) -> None:
        self._record, self._admission, self._epochs = record, admission, epochs
        self._again: dict[int, float] = {}  # when a node is asked again to join
        self._later: dict[int, float] = {}  # when a newcomer that did not answer is tried again
        self._added: set[int] = set()

    def on_fit_start(self, server: Server, state: FederationState) -> None:
        """Prepares for newcomers."""
        self._onboarding = Onboarding(server.transport, server.module, server.data, server.method, state, self._epochs)

    def on_round_logged(self, server: Server, state: FederationState) -> None:
        """Adds those that have registered since the last round."""
        if state.round > 0:
            self._add_all(server, state)

    def _add_all(self, server: Server, state: FederationState) -> None:
        data, members, now = server.data, self._record.members, time.monotonic()
        assert isinstance(data, FleetData), "the run is one of a fleet"
        newcomers = [client for client in data.newcomer_clients if client not in self._added]
        if not newcomers:
            return
        known = {member.node for member in members.values()}
        ready = [node for node in self._admission.post.link.nodes() if self._again.get(node, 0.0) <= now]
        strangers = [node for node in ready if node not in known]
        joined = self._admission.ask(strangers, list(members.values())) if strangers else []
        later = _later(now)
        self._again |= {
            node: later if node in self._admission.silent else time.monotonic() + AGAIN for node in strangers
        }
        for client, member in numbered(joined, [client for client in newcomers if client not in members]).items():
            members[client] = member
            data.enter(client, member.name, member.sizes)
            LOGGER.info("round %d: %s has registered and is a newcomer", state.round - 1, member.name)
            write_members(server.run_dir, self._record.run, members)
        for client in newcomers:
            if client in members and self._later.get(client, 0.0) <= now:
                self._add(server, state, client)

    def _add(self, server: Server, state: FederationState, client: int) -> None:
        """Adds one newcomer; warns if it does not answer, and tries again later."""
        before, begin = state.assignment, time.monotonic()
        state.assignment = before.clone()  # the federation must not count it
        try:
            self._onboarding.add(client)
        except ValueError as error:
            self._later[client] = _later(begin)
            name = self._record.members[client].name
            warnings.warn(f"round {state.round - 1}: {name}: {error}", stacklevel=2)
            return
        finally:
            state.assignment = before
        self._added.add(client)
        self._onboarding.result(server.run_dir).write(server.run_dir)


def _later(begin: float) -> float:
    """Returns when a node is tried again that has been waited for since `begin`."""
    now = time.monotonic()
    return now + max(AGAIN, LEAST_WORK * (now - begin))
