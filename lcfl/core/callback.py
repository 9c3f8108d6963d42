"""The hooks of a run, and the base class of all callbacks."""

from collections.abc import Iterable, Mapping
from copy import copy
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, ClassVar

from lcfl.core.schema import Forms
from lcfl.core.validation import CheckedFields

__all__ = ["HOOKS", "Callback", "check_hooks", "with_state_keys"]

# The arguments that each hook may take in addition to `server` and `state`.
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


class Callback(CheckedFields):
    """Base class of objects that are called during a federation. All hooks run on the server, rank 0.

    A subclass defines any of these hooks, each with any of the arguments listed next to it. Arguments are passed by
    name. `server` is the `lcfl.server.server.Server`, and `state` is its `FederationState`.

    ====================  =============================================================================
    on_fit_start          server, state
    on_extra_round_end    server, state, uploads: called after each warm-up round, where state.round is negative, and
                          after each extra round, which precedes the training round state.round
    on_round_start        server, state
    on_clients_sampled    server, state, sampled: the numbers of the sampled clients, in ascending order
    on_uploads            server, state, uploads: a list with one `Uplink` per client, in client order
    on_round_end          server, state, uploads: called before aggregation; clustering happens here
    on_aggregated         server, state, uploads: called when the new models are in place; cluster tuning happens here
    on_evaluated          server, state, evaluation: the `Evaluation` of this round
    on_round_logged       server, state, row: the metrics of the round by name, which are already written; from here on
                          it is too late for `server.log`
    on_checkpoint         server, state, path: the path of the checkpoint that was just written
    on_fit_end            server, state, metrics: the final metrics by name
    ====================  =============================================================================

    Hooks pass results on through the state, and their return values are ignored. What a callback must remember between
    rounds is saved with every checkpoint: either it lists the names in `remembers`, or it overrides `state_dict` and
    `load_state_dict`.
    """

    #: False for a callback that only observes. A run may be resumed with different observers.
    shapes_result: bool = False
    #: What it remembers, and in what form (`lcfl.core.schema`). The value of ``name`` is in the attribute ``_name``.
    remembers: ClassVar[Forms] = {}

    @property
    def key(self) -> str:
        """The name under which a checkpoint stores its state."""
        return type(self).__qualname__

    def check_monitor(self, metrics: Mapping[str, bool], default: str) -> None:
        """Raises a ValueError if it waits for a metric that no evaluation of the run has.

        Called before anything is written.

        Args:
            metrics: for each metric of the run's evaluations, whether larger values are better; empty if nothing is
                evaluated during the run.
            default: the metric to wait for if none is named: the reported one of the first kind of model that the
                method reports, on validation data.
        """

    def forget(self) -> None:
        """Gives everything that it remembers its initial value.

        Called before each run, so that one object can be used for several. If a run is resumed, `load_state_dict`
        follows.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what must survive when a run is resumed: tensors and plain values.

        By default these are the values in `remembers`. A numpy scalar comes back as a plain number. Anything else, e.g.
        a numpy array, ends the run with a ValueError at its first checkpoint.
        """
        if unset := [name for name in self.remembers if not hasattr(self, f"_{name}")]:
            raise ValueError(
                f"{type(self).__name__}: remembers names {unset[0]!r}, but there is no self._{unset[0]}. Set it in "
                "forget."
            )
        return {name: copy(getattr(self, f"_{name}")) for name in self.remembers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. A value that `state` lacks stays as it is."""
        for name in self.remembers:
            if name in state:
                setattr(self, f"_{name}", copy(state[name]))


def with_state_keys(callbacks: Iterable["Callback"]) -> list[tuple[str, "Callback"]]:
    """Returns callbacks with their keys in a checkpoint; the second callback of a class has the key ``Name#2``."""
    by_key: dict[str, Callback] = {}
    for callback in callbacks:
        key, number = callback.key, 2
        while key in by_key:
            key, number = f"{callback.key}#{number}", number + 1
        by_key[key] = callback
    return list(by_key.items())


def check_hooks(callbacks: Iterable[object], option: str = "trainer.callbacks") -> None:
    """Raises a ValueError for a public ``on_*`` method that is not a hook or requires an argument it does not get."""
    for callback in callbacks:
        for name in dir(callback):
            if not name.startswith("on_"):
                continue
            where = f"{option}: {type(callback).__name__}.{name}"
            if name not in HOOKS:
                close = get_close_matches(name, HOOKS, n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise ValueError(
                    f"{where} is not a hook and would never be called.{hint} The hooks are {', '.join(HOOKS)}."
                )
            allowed = ("server", "state", *HOOKS[name])
            unknown = [argument for argument in _required(getattr(callback, name)) if argument not in allowed]
            if unknown:
                raise ValueError(
                    f"{where} requires {', '.join(unknown)}; a hook gets its arguments by name, and this one may take "
                    f"any of {', '.join(allowed)}."
                )


def _required(method: Any) -> list[str]:
    """Returns the names of the arguments that a method cannot be called without."""
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    parameters = signature(method).parameters.values()
    return [each.name for each in parameters if each.default is Parameter.empty and each.kind not in variadic]
