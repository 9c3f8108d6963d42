"""Saves the state at regular intervals, keeps the newest checkpoints and the best one, and removes the others."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from lcfl.callbacks.monitored_metric import MonitoredMetric
from lcfl.core.callback import Callback
from lcfl.core.files import write_json
from lcfl.core.schema import check_form
from lcfl.core.state import FederationState
from lcfl.runs import checkpoint, checkpoint_lookup
from lcfl.server.server import Server

__all__ = ["Checkpoint"]

BEST = {"round": int, "monitor": str, "mode": str, "score": float}


class Checkpoint(Callback):
    """Writes ``checkpoints/round-<n>.ckpt`` every n rounds, at the end, and when a signal stops the run.

    Args:
        every_n_rounds: number of rounds between two checkpoints.
        keep_last: how many of the newest checkpoints to keep; None keeps all.
        monitor: metric that decides which checkpoint is the best, which is kept too, e.g.
            ``val/own_split/personal/acc``. Metrics of test data are refused, because choosing by them is cheating.
        mode: whether the best is the largest (``max``) or the smallest (``min``) value; None for what is known of the
            metric.

    Raises:
        ValueError: for numbers below 1, and a monitor that has no name, is of test data or is never measured.
    """

    def __init__(
        self,
        every_n_rounds: int = 10,
        keep_last: int | None = 2,
        monitor: str | None = None,
        mode: Literal["max", "min"] | None = None,
    ) -> None:
        for name, value in (("every_n_rounds", every_n_rounds), ("keep_last", keep_last)):
            if value is not None and value < 1:
                raise ValueError(f"Checkpoint: got {name}={value}; it must be at least 1.")
        self.every_n_rounds, self.keep_last, self.monitor, self.mode = every_n_rounds, keep_last, monitor, mode
        self._monitored = None if monitor is None else MonitoredMetric("Checkpoint", monitor, mode)
        self.forget()

    def forget(self) -> None:
        """Forgets the best round, and which checkpoint it wrote last."""
        self.best: dict[str, Any] | None = None
        self._written: int | None = None

    def check_monitor(self, metrics: Mapping[str, bool], default: str) -> None:
        """Refuses a monitor that is never measured."""
        if self.monitor is not None:
            self._monitored = MonitoredMetric("Checkpoint", self.monitor, self.mode).among(metrics, default)

    def on_fit_start(self, server: Server) -> None:
        """Names the best round of the checkpoint, because a killed run may not have written ``best.json``."""
        self._name_best(server.run_dir / "checkpoints")

    def on_round_logged(self, server: Server, state: FederationState, row: dict[str, float]) -> None:
        """Writes a checkpoint if one is due.

        The metric of a round decides only about rounds that are saved.
        """
        is_last = server.is_done or bool(server.stop_signal)
        is_better = self._is_better(row, server)
        if is_better:
            assert self.monitor is not None
            score = row[self.monitor]
            self.best = {"round": state.round, "monitor": self.monitor, "mode": self._found_mode, "score": score}
        if is_last or is_better or state.round % self.every_n_rounds == 0:
            self._write(server, state, is_better)

    def on_fit_end(self, server: Server, state: FederationState) -> None:
        """Writes the last checkpoint if it does not exist yet; warns if no round had the metric."""
        if self._written != state.round:
            self._write(server, state, is_better=False)
        if self._monitored is not None:
            self._monitored.warn_if_never_seen(server)

    def _write(self, server: Server, state: FederationState, is_better: bool) -> None:
        server.table.sync()
        # Otherwise a killed run that resumes here would lack what TensorBoard still has in its queue.
        server.run_log.tell_loggers("save", lambda each: each.save())
        server.remembered.collect(state)
        folder = server.run_dir / "checkpoints"
        try:
            path = checkpoint.write(folder, state, server.identity)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror or error}: round {state.round} is not in {folder}; earlier checkpoints are "
                "whole. Make the folder writable, with space for one more, and resume the newest (--ckpt_path last)",
            ) from error
        if is_better:
            self._name_best(path.parent)
        self._prune(path.parent)
        self._written = state.round
        server.call("on_checkpoint", path=path)

    def state_dict(self) -> dict[str, Any]:
        """Returns the best round so far and its score."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the best round so far, unless it was the best by another monitor or mode."""
        self.best = (
            None if state["best"] is None else state["best"] | {"mode": state["best"].get("mode", self._found_mode)}
        )  # older ones lack it
        check_form("best", self.best, (BEST, None), {})
        if self.best is not None and self.monitor is not None:
            is_same = (self.best["monitor"], self.best["mode"]) == (self.monitor, self._found_mode)
            self.best = self.best if is_same else None

    def _is_better(self, row: dict[str, float], server: Server) -> bool:
        score = None if self._monitored is None else self._monitored.score(row, server)
        if score is None or not isfinite(score):
            return False
        if self.best is None:
            return True
        best = float(self.best["score"])
        return score > (best if self._found_mode == "max" else -best)

    @property
    def _found_mode(self) -> str:
        """The mode that was given, or what this run knows of the metric."""
        return (None if self._monitored is None else self._monitored.mode) or "max"

    def _name_best(self, folder: Path) -> None:
        if self.best is not None and (path := checkpoint.path_of(folder, self.best["round"])).is_dir():
            write_json(folder / "best.json", {"checkpoint": path.name} | self.best)
        elif self.monitor is not None:
            (folder / "best.json").unlink(missing_ok=True)

    def _prune(self, folder: Path) -> None:
        """Removes all checkpoints but the newest and the best.

        Files that they share by hard link with others stay.
        """
        if self.keep_last is None:
            return
        best = None if self.best is None else self.best["round"]
        for number, path in checkpoint.saved_in(folder)[: -self.keep_last]:
            if number != best:
                checkpoint_lookup.remove(path)
