"""AS-CFL's first stage: greedy clusters of clients that do not harm each other's model (section 3.2).

Legend: n clients that sent an update, N samples that these have, D_test the server's proxy set.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from lcfl.core.messages import Uplink
from lcfl.core.state import FederationState
from lcfl.core.validation import check_choices
from lcfl.methods.aggregation.update_mean import updated_model
from lcfl.methods.clustering.base import Clustering, ServerView
from lcfl.methods.clustering.similarity import cosine, leading_coordinates
from lcfl.methods.clustering.split_and_merge import drop_empty
from lcfl.models.layout import Layout

__all__ = ["GreedyIncentive", "admits", "candidates_of", "representativeness", "similarities"]


@dataclass
class GreedyIncentive(Clustering):
    """Grows clusters from representative seeds, client by client, as long as the joint model passes a test.

    Every round starts anew (AS-CFL Algorithm 1, lines 13 to 16). The seed is the unassigned client with the largest
    data-weighted similarity to the unassigned ones; candidates are the 20 % that are most similar to the seed, at
    least one, in falling order. A candidate's test is the accuracy on D_test of the weighted mean of the models of
    all members and its own. The first that fails ends the cluster; where all are admitted, candidates are drawn
    again. What is left over begins with a new seed.

    The similarity is the cosine of the updates of the output layer (the network's decision) in the leading
    components that explain 95 % of their variance. The paper's formula factorises the matrix of similarities instead,
    M = U Sigma V^T of that many components: `factorised` takes it at its word (reading A31).

    The paper's test, rule ``strict``, is an accuracy above theta that also rises by the margin: from an untrained
    model nobody ever passes it, and above theta hardly anybody can. ``relative`` admits a candidate whose model has
    at least theta times the best accuracy of any model tested in this round, and loses no more than the margin
    (reading A10).

    A cluster keeps the number of the one before it with which it shares most members, and a client without an
    update keeps its number; its old cluster stays as it is where no new one has that number.

    Without a proxy set (``data.proxy``) it warns and goes by similarity alone, as with `incentive` false.

    Args:
        theta: of the rule.
        margin: of the rule: an accuracy, 0 to 1.
        rule: ``relative`` or ``strict``.
        incentive: False: admit all candidates of the first draw untested (the paper's variant "w/o positive
            incentive").
        candidates: the share of the unassigned clients that are candidates.
        explained_variance: of the leading components; null compares the updates themselves ("w/o low-rank").
        factorised: ``updates``, or ``similarities`` for the matrix of their cosines; without `explained_variance` the
            two are the same.
        layers: ``output``, or ``all`` for the whole update.
        once: form clusters in the first round and leave them.
    """

    theta: float = 0.85
    margin: float = 0.03
    rule: Literal["relative", "strict"] = "relative"
    incentive: bool = True
    candidates: float = 0.2
    explained_variance: float | None = 0.95
    factorised: Literal["updates", "similarities"] = "updates"
    layers: Literal["output", "all"] = "output"
    once: bool = False

    reads: ClassVar[tuple[str, ...]] = ("update",)

    def __post_init__(self) -> None:
        check_choices("GreedyIncentive", self)
        for name in ("theta", "candidates", "explained_variance"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"GreedyIncentive: got {name}={value}; it must lie in (0, 1].")
        if not 0 <= self.margin < 1:
            raise ValueError(f"GreedyIncentive: got margin={self.margin}; it must lie in [0, 1).")
        self._done = False

    def on_fit_start(self, server: ServerView, state: FederationState) -> None:
        """Forgets an earlier run of this object; says so if nothing can be tested."""
        if not state.callbacks:
            self._done = False
        if self.incentive and not server.has_proxy:
            warnings.warn(
                "GreedyIncentive: without a proxy set no candidate can be tested, and all are admitted by similarity "
                "alone, as with incentive: false. Set data.proxy, e.g. to 1000.",
                stacklevel=2,
            )

    def check_layout(self, layout: Layout) -> None:
        """An output layer is there."""
        if self.layers == "output" and layout.num_embedding == layout.num_parameters:
            raise ValueError(
                "method.clustering: GreedyIncentive got layers=output, but model.cut leaves no decision; use all."
            )

    def on_round_end(self, server: ServerView, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """New clusters of the clients whose updates are in."""
        if not uploads or (self.once and self._done):
            return
        layout = server.layout
        begin = layout.num_embedding if self.layers == "output" else 0
        update_nP = torch.stack([upload.payload["update"][begin : layout.num_parameters] for upload in uploads])
        groups = self._grow(server, uploads, similarities(update_nP, self.explained_variance, self.factorised))
        _take_over(state, [upload.client for upload in uploads], groups)
        self._done = True

    def state_dict(self) -> dict[str, Any]:
        """Whether clusters have been formed."""
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back whether clusters have been formed."""
        self._done = state["done"]

    def _grow(self, server: ServerView, uploads: Sequence[Uplink], similarity_nn: Tensor) -> list[list[int]]:
        """The clusters as positions in `uploads`, in the order in which they were begun."""
        left = list(range(len(uploads)))
        weight_n = torch.tensor([upload.num_samples for upload in uploads], dtype=torch.float64)
        trial = _Trial(server, uploads, self.theta, self.margin, self.rule)
        groups = []
        while left:
            seed = left[int(representativeness(similarity_nn[left][:, left], weight_n[left]).argmax())]
            left.remove(seed)
            group, is_open = [seed], bool(left)
            tested = self.incentive and server.has_proxy
            if tested:
                trial.begin(seed)
            while is_open and left:
                drawn = candidates_of(similarity_nn[seed], left, self.candidates)
                admitted = trial.admitted(group, drawn) if tested else len(drawn)
                group += drawn[:admitted]
                left = [each for each in left if each not in group]
                is_open = tested and admitted == len(drawn)
            groups.append(group)
        server.log("cluster/admitted", len(uploads) - len(groups))
        server.log("cluster/tested_models", trial.num_tested)
        return groups


class _Trial:
    """Tests candidates on the proxy set, and knows the best accuracy of the round so far."""

    def __init__(self, server: ServerView, uploads: Sequence[Uplink], theta: float, margin: float, rule: str) -> None:
        self.server, self.uploads = server, uploads
        self.theta, self.margin, self.rule = theta, margin, rule
        self.best = self.current = 0.0
        self.num_tested = 0

    def begin(self, seed: int) -> None:
        """Measures a seed's own model."""
        (self.current,) = self._accuracy([[seed]])
        self.best = max(self.best, self.current)

    def admitted(self, group: list[int], drawn: list[int]) -> int:
        """How many of the candidates `drawn` join, one after the other, before the first that does not.

        The models of all are measured together, on all ranks; those behind the first that fails are forgotten.
        """
        chain = [group + drawn[: number + 1] for number in range(len(drawn))]
        for number, accuracy in enumerate(self._accuracy(chain)):
            self.best = max(self.best, accuracy)
            if not admits(accuracy, self.current, self.best, self.theta, self.margin, self.rule):
                return number
            self.current = accuracy
        return len(drawn)

    def _accuracy(self, groups: Sequence[list[int]]) -> list[float]:
        self.num_tested += len(groups)
        layout = self.server.layout
        return self.server.proxy_accuracy([updated_model([self.uploads[i] for i in each], layout) for each in groups])


def similarities(update_nP: Tensor, explained_variance: float | None, factorised: str) -> Tensor:
    """sim(i, j) ``[n, n]`` of updates ``[n, P]``, float64 (AS-CFL section 3.2.2; reading A31).

    Args:
        update_nP: what is compared of each client.
        explained_variance: sets the rank r: as many components of the updates as explain that much of them; null: all.
        factorised: ``updates``: cosines in these components; ``similarities``: M ~ U Sigma V^T of rank r, M being the
            cosines of the updates themselves.
    """
    code_nD = leading_coordinates(update_nP, explained_variance)
    if factorised == "updates":
        return cosine(code_nD, code_nD)
    rank = code_nD.shape[1]
    whole_nD = leading_coordinates(update_nP, None)
    left_nn, scale_n, right_nn = torch.linalg.svd(cosine(whole_nD, whole_nD))
    cut_nn: Tensor = (left_nn[:, :rank] * scale_n[:rank]) @ right_nn[:rank]
    return cut_nn


def representativeness(similarity_nn: Tensor, weight_n: Tensor) -> Tensor:
    """``score_i = sum_j (n_j / N) sim(i, j)`` ``[n]`` (AS-CFL section 3.2.2, step i), over the clients given."""
    return similarity_nn @ (weight_n / weight_n.sum())


def candidates_of(similarity_n: Tensor, left: Sequence[int], share: float) -> list[int]:
    """The ceil(share of `left`) clients most similar to a seed, in falling order; the lower number first in a tie."""
    ranked = sorted(left, key=lambda each: (-float(similarity_n[each]), each))
    return ranked[: max(1, ceil(share * len(left) - 1e-9))]


def admits(accuracy: float, current: float, best: float, theta: float, margin: float, rule: str) -> bool:
    """Whether a candidate joins (AS-CFL Eq. 3 and section 3.2.1; reading A10).

    Args:
        accuracy: of the model with the candidate.
        current: of the model without it.
        best: of any model tested in this round, this one included.
        theta: threshold, or share of the best.
        margin: what the accuracy must rise by (``strict``), or may fall by (``relative``).
        rule: ``strict`` or ``relative``.
    """
    if rule == "strict":
        return accuracy > theta and accuracy >= current + margin
    return accuracy >= theta * best and accuracy >= current - margin


def _take_over(state: FederationState, clients: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
    """Numbers the groups by the clusters that they share most members with, new ones behind; drops empty clusters."""
    from scipy.optimize import linear_sum_assignment  # not at every start: only some methods need it

    before_n = state.assignment[list(clients)]
    shared = np.zeros((len(groups), state.num_clusters))
    for number, group in enumerate(groups):
        shared[number] = torch.bincount(before_n[list(group)], minlength=state.num_clusters).numpy()
    rows, columns = linear_sum_assignment(shared, maximize=True)
    number_of = {row: col for row, col in zip(rows.tolist(), columns.tolist(), strict=True) if shared[row, col] > 0}
    assignment, centres = state.assignment.clone(), [state.centres]
    for row, group in enumerate(groups):
        if row not in number_of:  # its own model comes with the aggregation
            number_of[row] = sum(map(len, centres))
            origin = int(before_n[group[0]])
            centres.append(state.centres[origin : origin + 1])
        assignment[[clients[each] for each in group]] = number_of[row]
    state.assignment, state.centres = assignment, torch.cat(centres)
    drop_empty(state)
