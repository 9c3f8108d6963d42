"""What the parts of a run remember from round to round, and how much of it a checkpoint holds."""

from collections.abc import Sequence

from lcfl.core.callback import Callback, with_state_keys
from lcfl.core.schema import check_form
from lcfl.core.state import FederationState
from lcfl.methods.method import Method
from lcfl.models.layout import Layout
from lcfl.models.module import FederatedModule
from lcfl.runs.unsaved import UnsavedMemory

__all__ = ["Remembered"]


class Remembered:
    """Puts what callbacks remember into the state of the federation, and warns of what no checkpoint holds.

    Args:
        callbacks: the clusterings, then the other callbacks.
        method: the method, whose other parts remember nothing of their own.
        layout: the layout of models in flat vectors.
        module: the module, if it is trained on this machine.
    """

    def __init__(
        self, callbacks: Sequence[Callback], method: Method, layout: Layout, module: FederatedModule | None
    ) -> None:
        self._callbacks, self._method, self._layout, self._module = callbacks, method, layout, module
        self._unsaved = UnsavedMemory([])

    def begin(self) -> None:
        """Notes what the parts have in their attributes at the start of a run.

        Raises:
            ValueError: if a callback has no attribute for a name in `remembers`.
        """
        for callback in self._callbacks:
            if _lists_names(callback):
                callback.state_dict()
        method, module = self._method, self._module
        parts = [method.local_update, method.exchange, *method.exchange.transforms, method.aggregation]
        parts += [each for each in self._callbacks if each.shapes_result]
        if module is None:
            self._unsaved = UnsavedMemory(parts)
        else:
            self._unsaved = UnsavedMemory([*parts, module, module.loss], module.network)

    def collect(self, state: FederationState) -> None:
        """Stores the states of the clusterings and callbacks in the state of the federation.

        Raises:
            ValueError: if one remembers a value of another form than it says.
        """
        self._unsaved.warn()
        sizes = {"N": state.num_clients, "S": self._layout.size, "P": self._layout.num_parameters}
        state.callbacks = {}
        for key, callback in with_state_keys(self._callbacks):
            state.callbacks[key] = kept = callback.state_dict()
            if _lists_names(callback):
                check_form(key, kept, dict(callback.remembers), dict(sizes))


def _lists_names(callback: Callback) -> bool:
    """Returns whether a callback lists what it remembers, and so in what form; others override `state_dict`."""
    return type(callback).state_dict is Callback.state_dict
