"""Terminal output of a run: where its files are, how far it is, and its results."""

import shlex
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from math import ceil, nan
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning.fabric.loggers.tensorboard import TensorBoardLogger

from lcfl.callbacks.checkpoint import Checkpoint
from lcfl.core.callback import Callback
from lcfl.core.messages import Uplink
from lcfl.core.metric_names import ACCURACY, MODEL_KINDS, TRIVIAL, Reported, added_metrics
from lcfl.core.output import lossy_output
from lcfl.core.state import FederationState
from lcfl.runs.directory import how_to_resume
from lcfl.server.metrics import Evaluation
from lcfl.server.server import Server

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

__all__ = ["Progress", "evaluation_table", "evaluation_tables", "make_console"]

LINES = 10  # plain lines per run; evaluations may add as many again
LONGEST_WITH_ROOM = 12  # longest name of a protocol that leaves room for wide gaps between the table's columns
SHORTEST_BAR = 2  # columns
NOTEBOOK_WIDTH = 100  # characters of the live line, so that a shorter one covers a longer one
REFRESH_S = 0.1  # shortest time between two updates, because rounds can take a millisecond


class Progress(Callback):
    """Prints a start line, progress, and a summary at the end, to standard output.

    On a terminal, progress is a live bar over the rounds, and in a notebook one live line. Otherwise it is at most
    about twenty plain lines: one at every tenth of the rounds, and one at each evaluation if there are no more than ten
    evaluations. The value shown is the latest accuracy, or other reported metric, of the first kind of model that the
    method reports, on test data if there are any.
    """

    def __init__(self) -> None:
        self._live: Live | None = None
        self._reported: tuple[str, float] | None = None
        self._begin: float | None = None
        self._first_round = 0
        self._refreshed = 0.0
        self._in_notebook = False
        self._extra = -1  # the last round with an extra round before it
        self._recurs = False  # whether the round before it had one, too

    def on_fit_start(self, server: Server, state: FederationState) -> None:
        """Prints what runs where; for a resumed run, also the round from which it continues."""
        self._reported, self._begin, self._first_round, self._extra = None, None, max(state.round, 0), -1
        console = make_console()
        say(console, start_line(server))
        if state.round > -len(server.method.warmup_rounds(server.data.num_initial_clients)):
            say(console, resumed(server))
        self._in_notebook = in_notebook()
        if console.is_interactive:
            self._live = start_live(console)

    def on_extra_round_end(self, server: Server, state: FederationState, uploads: list[Uplink]) -> None:
        """Prints, or shows in the bar, how many clients took part in the warm-up or extra round.

        If round after round has extra rounds, lines are printed as rarely as those of rounds.
        """
        what = "warm-up round" if state.round < 0 else f"extra round before round {state.round}"
        text = f"{what}: {len(uploads)} clients, {size(state.total_bytes)}"
        if state.round != self._extra:
            self._recurs, self._extra = 0 <= self._extra == state.round - 1, state.round
        if self._live is not None:
            self._show(server, text)
        elif not self._recurs or is_line_due(state.round + 1, server.schedule.rounds, server.schedule.evaluate_every):
            say(make_console(), text)

    def on_round_start(self) -> None:
        """Starts the clock at the first round."""
        if self._begin is None:
            self._begin = time.perf_counter()

    def on_evaluated(self, evaluation: Evaluation) -> None:
        """Remembers the value to show."""
        if found := evaluation.of_reported():
            name = min(found, key=lambda name: not name.startswith("test/"))
            self._reported = name, float(found[name].values.mean())

    def on_round_logged(self, server: Server, state: FederationState, row: dict[str, float]) -> None:
        """Moves the bar, or prints a line if one is due."""
        if state.round <= self._first_round or self._begin is None:
            return
        seconds = (time.perf_counter() - self._begin) / (state.round - self._first_round)
        is_last = server.is_done or bool(server.stop_signal)
        if self._live is None and not self._in_notebook:
            if is_last or is_line_due(state.round, server.schedule.rounds, server.schedule.evaluate_every):
                say(make_console(), self._line(server, row, seconds))
        elif is_last or time.perf_counter() - self._refreshed >= REFRESH_S:
            if self._in_notebook:  # a carriage return replaces the line
                print(f"\r{self._line(server, row, seconds):<{NOTEBOOK_WIDTH}}", end="\n" * is_last, flush=True)
            else:
                self._show(server, *self._status(server, row, seconds))
            self._refreshed = time.perf_counter()

    def on_fit_end(self, server: Server, state: FederationState, metrics: dict[str, float]) -> None:
        """Prints the table of results and where the files are; for a stopped run, how to resume it."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        console = make_console()
        if server.is_interrupted:
            say(console, stopped(server))
            return
        for table in evaluation_tables(metrics, "test", server.module.reported):
            console.print(table)
        for line in closing_lines(server):
            say(console, line)

    def _show(self, server: Server, *status: str) -> None:
        """Shows the live bar with this status."""
        assert self._live is not None
        done, width = max(server.state.round, 0), self._live.console.width
        self._live.update(bar(done, server.schedule.rounds, *status, width=width), refresh=True)

    def _line(self, server: Server, row: Mapping[str, float], seconds: float) -> str:
        rounds = server.schedule.rounds
        parts = [f"round {server.state.round:>{len(str(rounds))}}/{rounds}"]
        if self._reported is not None:
            name, value = self._reported
            parts.append(f"{name.removesuffix('/acc').replace('/', ' ')} {brief(value)}")
        if "cluster/count" in row:
            parts.append(f"clusters {row['cluster/count']:.0f}")
        return "  ".join([*parts, size(server.state.total_bytes), pace(seconds)])

    def _status(self, server: Server, row: Mapping[str, float], seconds: float) -> list[str]:
        """Returns what is shown next to a bar. In 80 columns there is room for all of it."""
        parts = []
        if self._reported is not None:
            name, value = self._reported
            parts.append(f"{name.partition('/')[0]} {brief(value)}")
        if "cluster/count" in row:
            parts.append(f"{row['cluster/count']:.0f} clusters")
        left = timedelta(seconds=round(seconds * (server.schedule.rounds - server.state.round)))
        return [*parts, size(server.state.total_bytes), pace(seconds), f"{left} left"]


def evaluation_tables(
    metrics: Mapping[str, float], stage: Literal["val", "test"], reported: Reported = ACCURACY
) -> "list[Table]":
    """Returns the `evaluation_table` of the reported metric (the accuracy if not given), and of every other one."""
    names = reported.name, *added_metrics(metrics, reported.name)
    tables = [evaluation_table(metrics, stage, each) for each in names]
    for table in tables[1:]:
        table.title = f"\n{table.title}"
    return tables


def evaluation_table(metrics: Mapping[str, float], stage: Literal["val", "test"], metric: str = "acc") -> "Table":
    """Returns a table of one metric of one stage: a section per protocol, a row per kind of model.

    The columns are summaries over clients: mean, standard deviation, mean of the worst 10 %, and mean weighted by
    samples. The stage ``test`` also has the validation mean if there is one. Accuracies are in percent. The last row of
    the reported metric is the trivial baseline, for accuracies that of always predicting each client's most frequent
    training label. Values that `metrics` lacks are blank. The table fits into 80 columns.

    Args:
        metrics: metrics by full name, e.g. ``test/own_split/personal/acc``.
        stage: ``val`` or ``test``.
        metric: the last part of those names.
    """
    from rich import box
    from rich.table import Table

    columns = table_columns(metrics, stage, metric)
    kinds_by_protocol, shown = kinds_of(metrics, stage, metric), Reported(metric)
    has_room = max(map(len, kinds_by_protocol), default=0) <= LONGEST_WITH_ROOM
    table = Table(
        title=f"{stage} {shown.title} over clients{shown.unit}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1) if has_room else (0, 0, 0, 1),
    )
    table.add_column("protocol", overflow="fold")  # with too little room, names are wrapped and numbers are not cut
    table.add_column("model", overflow="fold")
    for header in columns:
        table.add_column(header, justify="right", no_wrap=True)
    for protocol, kinds in kinds_by_protocol.items():
        for number, kind in enumerate(sorted(kinds, key=place_of)):
            values = [metrics.get(name.format(protocol=protocol, kind=kind), nan) for name in columns.values()]
            label = shown.trivial if kind == TRIVIAL else kind
            table.add_row("" if number else protocol, label, *map(shown.text, values))
        table.add_section()
    return table


def table_columns(metrics: Mapping[str, float], stage: str, metric: str) -> dict[str, str]:
    """Returns the metric of each column, as a name with placeholders ``{protocol}`` and ``{kind}``."""
    suffixes = {"mean": "", "std": "_std", "worst 10 %": "_worst10", "weighted": "_weighted"}
    columns = {header: f"{stage}/{{protocol}}/{{kind}}/{metric}{suffix}" for header, suffix in suffixes.items()}
    if stage == "test" and any(name.startswith("val/") for name in metrics):
        columns["val"] = f"val/own_split/{{kind}}/{metric}"  # the client's own data under every test protocol
    return columns


def kinds_of(metrics: Mapping[str, float], stage: str, metric: str) -> dict[str, list[str]]:
    """Returns the kinds of model that have a metric, by protocol."""
    by_protocol: dict[str, list[str]] = {}
    for name in metrics:
        parts = name.split("/")
        if len(parts) == 4 and parts[0] == stage and parts[3] == metric:
            by_protocol.setdefault(parts[1], []).append(parts[2])
    return by_protocol


def start_line(server: Server) -> str:
    """Returns the start line: run directory, ranks, engine, precision, clients, model size."""
    layout, fabric, identity = server.layout, server.fabric, server.identity
    apart = server.module.frozen_layout
    frozen = "" if apart is None else f", {apart.num_parameters:,} frozen"
    return (
        f"{server.run_dir}: {fabric.world_size} x {fabric.device.type}, {identity['engine']}, {identity['precision']}, "
        f"{server.data.num_clients} clients, {server.schedule.clients_per_round} per round, "
        f"{layout.num_parameters:,} parameters ({layout.num_embedding:,} in the embedding){frozen}"
    )


def resumed(server: Server) -> str:
    """Returns where a resumed run continues, or that it has no rounds left."""
    done, wanted = max(server.state.round, 0), server.schedule.rounds
    if not server.is_done:
        return f"resumed: {done} of {wanted} rounds are done"
    reason = f"trainer.rounds is {wanted}" if done >= wanted else "it was stopped early"
    return f"resumed after {done} rounds: {reason}, so it is only evaluated"


def stopped(server: Server) -> str:
    """Returns the line for a run that a signal ended."""
    try:
        reason = signal.Signals(server.stop_signal).name
    except ValueError:
        reason = f"signal {server.stop_signal}"
    text = f"stopped by {reason} after {max(server.state.round, 0)} of {server.schedule.rounds} rounds; "
    if any(isinstance(callback, Checkpoint) for callback in server.callbacks):
        return text + f"resume it {how_to_resume(server.run_dir)}"
    return text + "it cannot be resumed, because trainer.enable_checkpointing is false"


def closing_lines(server: Server) -> list[str]:
    """Returns the lines below the table: who is not in it, cost, directories, and how to view the curves."""
    state, population = server.state, server.data.population
    early = f" (stopped early, {server.schedule.rounds} planned)" if state.round < server.schedule.rounds else ""
    lines = [f"{state.round} round{'s' * (state.round != 1)}{early}, {size(state.total_bytes)} sent and received"]
    if more := int(sum(server.table.column("comm/client_projection_bytes"))):
        total = size(state.total_bytes + more)
        lines.append(f"{size(more)} more if the clients computed the projection ({total} in total)")
    if population.faulty:
        lines.append(f"{len(population.faulty)} of {server.data.num_clients} clients are faulty and are not measured")
    if failed := sum(server.table.column("train/failed_clients")):
        lines.append(f"{failed:.0f} updates were not finite and were left out")
    if refused := sum(server.table.column("train/refused_clients")):
        lines.append(f"{refused:.0f} updates beyond trainer.max_update_norm were refused")
    if (guarantee := server.privacy_guarantee()) is not None:
        lines.append(f"privacy: {guarantee}")
    lines.append(f"logs: {server.run_dir}")
    for logger in server.loggers:
        if isinstance(logger, TensorBoardLogger):
            lines.append(f"tensorboard --logdir {shlex.quote(str(Path(logger.log_dir).parent))}")
    return lines


def is_line_due(number: int, rounds: int, evaluate_every: int) -> bool:
    """Returns whether a plain line is due after `number` rounds."""
    if number == rounds or number % ceil(rounds / LINES) == 0:
        return True
    return bool(evaluate_every) and number % evaluate_every == 0 and rounds // evaluate_every <= LINES


def place_of(kind: str) -> tuple[int, str]:
    """Returns a sort key for kinds of model: those of the package in their order, then others, then the baseline."""
    return (MODEL_KINDS.index(kind) if kind in MODEL_KINDS else len(MODEL_KINDS) + (kind == TRIVIAL), kind)


def brief(value: float) -> str:
    """Returns a number for a line with little room: three decimals, or three digits of a large one."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.3g}"


def size(num_bytes: int) -> str:
    """Returns bytes in decimal megabytes."""
    return f"{num_bytes / 1e6:,.1f} MB"


def pace(seconds: float) -> str:
    """Returns seconds per round with two or three decimals, so that short times keep two significant digits."""
    return f"{seconds:.{3 if seconds < 0.1 else 2}f} s/round"


def make_console() -> "Console":
    """Returns a console for the current standard output, which loses lines and not the run if nobody takes them.

    It is a new console each time, so that none is kept or pickled. In a notebook it prints plain text, because rich
    would make every line an output of its own. It would also take the notebook for a terminal, which Jupyter asks for
    with ``FORCE_COLOR``.
    """
    from rich.console import Console

    return Console(
        file=lossy_output(),
        highlight=False,
        markup=False,
        emoji=False,
        force_jupyter=False,
        force_terminal=False if in_notebook() else None,  # None lets rich find out
    )


def in_notebook() -> bool:
    """Returns whether the output goes to a Jupyter notebook."""
    from rich.console import Console

    return Console().is_jupyter


def say(console: "Console", text: str) -> None:
    """Prints one line unwrapped, however long it is, so that paths and commands can be copied."""
    console.print(text, soft_wrap=True)


def start_live(console: "Console") -> "Live":
    """Starts a live display that leaves nothing behind if the run ends with an exception.

    No hook is called in that case, so the display uses no thread, redirects no stream and hides no cursor.
    """
    from rich.live import Live

    live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    live.start()
    console.show_cursor(True)
    return live


def bar(done: int, total: int, *status: str, width: int = 80) -> "Table":
    """Returns one line: the round, a bar as wide as there is room for, and the status.

    In fewer columns than it takes, the last but one part of the status is left out first, and so on.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    track = ProgressBar(total=max(total, 1), completed=done)
    number, parts = f"round {done}/{total}", list(status)
    while len(parts) > 1 and len(number) + len("  ".join(parts)) + 2 + SHORTEST_BAR > width:
        parts.pop(-2)
    line.add_row(number, track, Text("  ".join(parts), overflow="ellipsis"))
    return line
