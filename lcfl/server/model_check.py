"""Checks of the global model and the centres that a clustering or an aggregation has set."""

import warnings

from lcfl.core.state import FederationState

__all__ = ["ModelCheck"]


class ModelCheck:
    """Refuses what are no models, and warns once of models with NaN or infinity."""

    def __init__(self) -> None:
        self._broken: set[str] = set()

    def __call__(self, state: FederationState, by: str) -> None:
        """Checks the models of a state.

        Args:
            state: the state of the federation.
            by: who has just set them, for the message.

        Raises:
            ValueError: see `FederationState.check_models`.
        """
        state.check_models(by)
        for name in sorted({"global_model", "centres"} - self._broken):
            model = getattr(state, name)
            if model.sum().isfinite() or model.isfinite().all():
                continue
            self._broken.add(name)
            warnings.warn(
                f"{by}: state.{name} is not finite, although only finite uploads are used. Models that begin from it "
                "are not finite either, and a smaller learning rate does not help.",
                stacklevel=3,
            )
