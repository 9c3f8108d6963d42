"""The hooks of a round, and the base class of everything that is called at one."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

__all__ = ["HOOKS", "Callback", "check_hooks", "with_state_keys"]

# What each hook may take beside `server` and `state`.
HOOKS: dict[str, tuple[str, ...]] = {
    "on_fit_start": (),
    "on_extra_round_end": ("uploads",),
    "on_round_start": (),
    "on_clients_sampled": ("sampled",),
    "on_uploads": ("uploads",),
    "on_round_end": ("uploads",),
    "on_aggregated": ("uploads",),
    "on_evaluated": ("evaluation",),
    "on_round_logged": ("row",),
    "on_checkpoint": ("path",),
    "on_fit_end": ("metrics",),
}


class Callback:
    """Something that is called during a federation. All hooks run on the server, rank 0.

    Define any of these, with any of the arguments that stand behind it, by name. `server` is the
    `lcfl.server.server.Server`, `state` its `FederationState`.

    ====================  =============================================================================
    on_fit_start          server, state
    on_extra_round_end        server, state, uploads: after each warm-up round, where state.round is negative, and
                          after each extra round, which comes before the training round state.round
    on_round_start        server, state
    on_clients_sampled    server, state, sampled: the clients' numbers, ascending
    on_uploads            server, state, uploads: list of `Uplink`, one a client, in client order
    on_round_end          server, state, uploads: clustering happens here, before aggregation
    on_aggregated         server, state, uploads: the new models stand; cluster tuning happens here
    on_evaluated          server, state, evaluation: the `Evaluation` of this round
    on_round_logged       server, state, row: the round's metrics by name, written; `server.log` is too late from here
    on_checkpoint         server, state, path: of the checkpoint just written
    on_fit_end            server, state, metrics: the final metrics by name
    ====================  =============================================================================

    Results travel through the state; what a hook returns is dropped. What a callback must remember
    between rounds it returns from `state_dict`; it is saved with every checkpoint.
    """

    #: False for a callback that only watches; a run may be resumed with other watchers.
    shapes_result: bool = False

    @property
    def key(self) -> str:
        """The name of its state in a checkpoint."""
        return type(self).__qualname__

    def check_monitor(self, names: Sequence[str]) -> None:
        """Raises a ValueError if it waits for a metric that is not among `names`, those of the run's evaluations.

        Called before anything is written; `names` is empty where nothing is evaluated during the run.
        """

    def state_dict(self) -> dict[str, Any]:
        """What survives a resume: tensors and plain values; a numpy scalar comes back as a plain number.

        Anything else, e.g. a numpy array, ends the run with a ValueError at its first checkpoint.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what `state_dict` returned."""


def with_state_keys(callbacks: Iterable["Callback"]) -> list[tuple[str, "Callback"]]:
    """Callbacks with the keys of their states in a checkpoint; a second one of a class has the key ``Name#2``."""
    found: dict[str, Callback] = {}
    for callback in callbacks:
        key, number = callback.key, 2
        while key in found:
            key, number = f"{callback.key}#{number}", number + 1
        found[key] = callback
    return list(found.items())


def check_hooks(callbacks: Iterable[object]) -> None:
    """Raises a ValueError for a public ``on_*`` method that would never be called, or not with these arguments."""
    for callback in callbacks:
        for name in dir(callback):
            if not name.startswith("on_"):
                continue
            where = f"trainer.callbacks: {type(callback).__name__}.{name}"
            if name not in HOOKS:
                close = get_close_matches(name, HOOKS, n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise ValueError(
                    f"{where} is no hook and would never be called.{hint} The hooks are {', '.join(HOOKS)}."
                )
            given = ("server", "state", *HOOKS[name])
            unknown = [each for each in _required(getattr(callback, name)) if each not in given]
            if unknown:
                raise ValueError(
                    f"{where} asks for {', '.join(unknown)}; a hook is called by name, this one with any of "
                    f"{', '.join(given)}."
                )


def _required(method: Any) -> list[str]:
    """The arguments that a method cannot be called without."""
    free = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    parameters = signature(method).parameters.values()
    return [each.name for each in parameters if each.default is Parameter.empty and each.kind not in free]
