"""Histograms and figures of the clients: how well each is served, and who is grouped with whom.

Legend: N clients, n shown clients, T rounds.
"""

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl import figures
from lcfl.core.callback import Callback
from lcfl.core.schema import Array, check_form
from lcfl.core.state import FederationState
from lcfl.data.population import Population
from lcfl.methods.clustering.similarity import cosine
from lcfl.methods.clustering.tuning import StoredModelGeometry, granularity
from lcfl.server.loggers import log_figure, log_histogram
from lcfl.server.metrics import Evaluation
from lcfl.server.server import Server

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Monitor", "partition_figure"]

ACCURACY_BINS = np.linspace(0, 1, 21)
NUM_BINS = 20  # of other metrics, from the smallest to the largest value
MODEL_NUMBERS = 2**25  # most numbers in the models of a map, which take a gigabyte with their principal components
HISTORY = {"rounds": Array(("T",), torch.int64), "assignments": Array(("T", None), torch.int16)}  # see `state_dict`
OUTSIDE = -1  # cluster of a client that is a newcomer or has left


class Monitor(Callback):
    """Draws figures into ``figures/`` and for the loggers, and writes histograms to TensorBoard.

    Before the first round it draws ``figures/partition``: how many training samples every client has, of each class if
    targets are classes.
    After the warm-up rounds it draws the figures of the clusterings, e.g. ``figures/distances`` (FedClust).

    At each evaluation it writes ``<stage>/<protocol>/<model>/acc_clients``, the histogram of the clients' accuracies,
    or of another metric that ``model.report`` names.

    At every `figure_every`-th evaluation and at the end it draws these figures:

    - ``figures/assignment``: the cluster of each client over the rounds,
    - ``figures/assignment_flow``: which clients moved to which cluster,
    - ``figures/cluster_sizes``,
    - ``figures/similarity`` and ``figures/codes`` of low-rank models, the latter with their directions in two
      dimensions, by cluster and by true group. The low-rank models are those of the clustering, or else principal
      components of the models that clients keep,
    - ``figures/granularity``, if clients keep models: G of each cluster.

    At the end it also draws ``figures/accuracies_<stage>_<protocol>``, of the reported metric. The step is the round
    that was evaluated. A figure shows at most 256 clients, spread evenly, and fewer in a map of kept models of more
    than 130,000 parameters.

    The figures show every round since the first, also in a resumed run. A set of figures takes half a second, and a map
    of large kept models a second or two. Nothing is written to a logger for rounds before the round in which this
    process began.

    Args:
        figure_every: number of evaluations between two sets of figures.
        figure_format: the format of the files.

    Raises:
        ValueError: for a number below 1, or another format.
    """

    def __init__(self, figure_every: int = 10, figure_format: Literal["png", "svg", "pdf"] = "png") -> None:
        if figure_every < 1:
            raise ValueError(f"Monitor: got figure_every={figure_every}; it must be at least 1.")
        self.figure_every, self.figure_format = figure_every, figure_format
        self.forget()
        self._evaluation = Evaluation()
        self._first_step = 0
        self._step = -1
        self._written: set[str] = set()
        self._is_drawn = False

    def forget(self) -> None:
        """Forgets the clusters of all rounds."""
        self._rounds: list[int] = []
        self._assignments: list[Tensor] = []

    def on_fit_start(self, server: Server, state: FederationState) -> None:
        """Draws which client has which samples, once, and drops later rounds of a run that had gone further."""
        kept = sum(number < state.round for number in self._rounds)
        self._rounds, self._assignments = self._rounds[:kept], self._assignments[:kept]
        self._evaluation, self._written, self._is_drawn = Evaluation(), set(), False
        self._first_step, self._step = max(state.round, 0), -1
        if state.round <= 0:
            self._step = 0
            self._draw_partition(server)

    def on_extra_round_end(self, server: Server, state: FederationState) -> None:
        """Draws the clusterings' own figures after the last warm-up round."""
        if state.round == -1:
            self._step = 0
            for clustering in server.method.clustering:
                for name, figure in clustering.figures(state).items():
                    self._figure(server, name, figure)

    def on_aggregated(self, server: Server, state: FederationState) -> None:
        """Remembers which client is in which cluster.

        This is before `on_round_logged`, in which checkpoints are written.
        """
        if server.method.is_clustered:
            self._rounds.append(state.round)
            seen = torch.where(state.active, state.assignment, OUTSIDE)
            self._assignments.append(seen[figures.shown(state.num_clients)].to(torch.int16))

    def on_evaluated(self, server: Server, state: FederationState, evaluation: Evaluation) -> None:
        """Writes the histograms of the round just finished, and draws its figures if they are due."""
        self._begin_step(state.round - 1)
        self._evaluation = evaluation
        for name, metric in evaluation.of_reported().items():
            borders = ACCURACY_BINS if evaluation.reported.is_accuracy else NUM_BINS
            self._histogram(server, f"{name}_clients", metric.values, borders)
        every = server.schedule.evaluate_every * self.figure_every
        if every and state.round % every == 0:
            self._draw(server, state)

    def on_fit_end(self, server: Server, state: FederationState, metrics: dict[str, float]) -> None:
        """Draws the last figures; those of accuracies only if the run is complete."""
        self._begin_step(state.round - 1)
        self._draw(server, state)
        if not server.is_interrupted:
            self._draw_accuracies(server)

    def state_dict(self) -> dict[str, Any]:
        """Returns the assignment history: ``assignments`` [T, n] int16 of the ``rounds`` [T] int64."""
        stacked = torch.stack(self._assignments) if self._assignments else torch.zeros(0, 0, dtype=torch.int16)
        return {"rounds": torch.tensor(self._rounds, dtype=torch.int64), "assignments": stacked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the assignment history."""
        check_form("Monitor", state, HISTORY, {})
        self._rounds = state["rounds"].tolist()
        self._assignments = list(state["assignments"])

    def _begin_step(self, step: int) -> None:
        """Begins a step, in which each tag is written once.

        The last round may be evaluated twice: once as a round and once at the end.
        """
        if step != self._step:
            self._step, self._written, self._is_drawn = step, set(), False

    def _draw(self, server: Server, state: FederationState) -> None:
        """Draws every figure for which the method has data, once per step."""
        if self._is_drawn:
            return
        self._is_drawn = True
        if self._rounds:
            assignment_Tn, rounds_T = torch.stack(self._assignments), torch.tensor(self._rounds)
            clients_n, groups = figures.shown(state.num_clients), server.data.population.groups
            groups_n = None if groups is None else groups[clients_n]
            picture = figures.assignment_heatmap(
                assignment_Tn, rounds_T, groups_n, clients_n, server.data.population.names_of(clients_n)
            )
            self._figure(server, "assignment", picture)
            self._figure(server, "assignment_flow", figures.assignment_flow(assignment_Tn, rounds_T))
            self._figure(server, "cluster_sizes", figures.cluster_sizes(assignment_Tn, rounds_T, state.num_clients))
        if (low_rank := self._low_rank_models(server, state)) is not None:
            self._draw_codes(server, state, *low_rank)
        if server.method.is_clustered and server.method.exchange.keeps_model and state.num_clusters > 1:
            intra_K, inter_K = granularity(state, server.layout.num_parameters)
            size_K = torch.tensor([len(state.members(cluster)) for cluster in range(state.num_clusters)])
            self._figure(server, "granularity", figures.granularity_bars(intra_K / inter_K, size_K))

    @staticmethod
    def _low_rank_models(server: Server, state: FederationState) -> tuple[Tensor, Tensor] | None:
        """Returns clients that took part and their low-rank models ``[n, D]``, or None.

        The clients are at most as many as a figure shows.
        """
        known = torch.nonzero(state.participated).flatten()
        if len(known) < 2:
            return None
        if state.codes is not None:
            known = known[figures.shown(len(known))]
            return known, state.codes[known]
        if not server.method.is_clustered or not server.method.exchange.keeps_model:
            return None
        known = known[figures.shown(len(known), max(2, MODEL_NUMBERS // server.layout.num_parameters))]
        try:
            return known, StoredModelGeometry(server, state).directions(known.tolist())
        except ValueError:  # the models are all equal
            return None

    def _draw_codes(self, server: Server, state: FederationState, known: Tensor, code_nD: Tensor) -> None:
        """Draws the low-rank models of the clients `known`: pairwise cosines, and a map."""
        cluster_n, groups = state.assignment[known], server.data.population.groups
        self._figure(server, "similarity", figures.similarity_matrix(cosine(code_nD, code_nD), cluster_n))
        groups_n = None if groups is None else groups[known.numpy()]
        self._figure(server, "codes", figures.code_map(code_nD, cluster_n, groups_n))

    def _draw_partition(self, server: Server) -> None:
        self._figure(server, "partition", partition_figure(server.data.population))

    def _draw_accuracies(self, server: Server) -> None:
        """Draws a figure for each stage and protocol of the last evaluation, with a line for each kind of model."""
        by_set: dict[tuple[str, str], dict[str, NDArray[np.float64]]] = {}
        reported = self._evaluation.reported
        for name, metric in self._evaluation.of_reported().items():
            stage, protocol, kind, _ = name.split("/", 3)
            by_set.setdefault((stage, protocol), {})[kind] = metric.values
        for (stage, protocol), values in by_set.items():
            figure = figures.sorted_values(values, f"Clients, {stage} {protocol}", reported)
            self._figure(server, f"accuracies_{stage}_{protocol}", figure)

    def _figure(self, server: Server, name: str, figure: "Figure") -> None:
        path = server.run_dir / "figures" / f"{name}.{self.figure_format}"
        figures.save(figure, path)
        figure.set_layout_engine("none")  # keeps the layout, because computing it again is most of the work
        if self._is_new:
            full = f"figures/{name}"
            server.run_log.tell_loggers("log_image", lambda each: log_figure(each, full, figure, path, self._step))

    def _histogram(self, server: Server, tag: str, values: NDArray[Any], borders: Any) -> None:
        values = values[np.isfinite(values)]  # a diverged client has none
        if tag not in self._written and len(values):
            self._written.add(tag)
            if self._is_new:
                server.run_log.tell_loggers(
                    "add_histogram", lambda each: log_histogram(each, tag, values, borders, self._step)
                )

    @property
    def _is_new(self) -> bool:
        """Whether no earlier process has logged this step."""
        return self._step >= self._first_step


def partition_figure(population: Population) -> "Figure":
    """Draws how many training samples every client has: of each class if targets are classes, else in all."""
    clients_n, groups = figures.shown(population.num_clients), population.groups
    names_n, title = population.names_of(clients_n), "Training samples"
    if population.label_counts is None:
        return figures.client_sizes(population.sizes[clients_n], clients_n, title, names_n)
    groups_n = None if groups is None else groups[clients_n]
    return figures.label_counts(population.label_counts[clients_n], groups_n, clients_n, title, names_n)
