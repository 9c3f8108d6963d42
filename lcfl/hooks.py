"""The hooks of a round, and the base class of everything that is called at one."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

__all__ = ["HOOKS", "Callback", "check_hooks"]

HOOKS = (
    "on_fit_start",
    "on_opening_end",
    "on_round_start",
    "on_clients_sampled",
    "on_uploads",
    "on_round_end",
    "on_aggregated",
    "on_evaluated",
    "on_round_logged",
    "on_checkpoint",
    "on_fit_end",
)


class Callback:
    """Something that is called during a federation. All hooks run on the server, rank 0.

    Define any of these, with any of the arguments that stand behind it, by name. `server` is the
    `lcfl.server.Server`, `state` its `FederationState`.

    ====================  =============================================================================
    on_fit_start          server, state
    on_opening_end        server, state, uploads: after each opening round; state.round is negative
    on_round_start        server, state
    on_clients_sampled    server, state, sampled: the clients' numbers, ascending
    on_uploads            server, state, uploads: list of `Uplink`, one a client, in client order
    on_round_end          server, state, uploads: clustering happens here, before aggregation
    on_aggregated         server, state, uploads: the new models stand; cluster tuning happens here
    on_evaluated          server, state, evaluation: the `Evaluation` of this round
    on_round_logged       server, state, row: the round's metrics by name
    on_checkpoint         server, state, path: of the checkpoint just written
    on_fit_end            server, state, metrics: the final metrics by name
    ====================  =============================================================================

    Results travel through the state; what a hook returns is dropped. What a callback must remember
    between rounds it returns from `state_dict`; it is saved with every checkpoint.
    """

    #: False for a callback that only watches: a run may be resumed with other watchers.
    shapes_result: bool = False

    @property
    def key(self) -> str:
        """The name of its state in a checkpoint."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What survives a resume: plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what `state_dict` returned."""


def check_hooks(callbacks: Iterable[object], known_elsewhere: Iterable[str] = ()) -> None:
    """Raises a ValueError for a public ``on_*`` method that no loop would ever call.

    Args:
        callbacks: the callbacks to look at.
        known_elsewhere: names that are hooks of something else and may stand there.
    """
    allowed = {*HOOKS, *known_elsewhere}
    for callback in callbacks:
        for name in dir(callback):
            if name.startswith("on_") and name not in allowed:
                close = get_close_matches(name, HOOKS, n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise ValueError(
                    f"trainer.callbacks: {type(callback).__name__}.{name} is no hook and would never be called.{hint} "
                    f"The hooks are {', '.join(HOOKS)}."
                )
