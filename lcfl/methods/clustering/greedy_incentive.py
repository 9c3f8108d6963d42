"""AS-CFL's first stage: greedy clusters of clients that do not harm each other's model (section 3.2).

Legend: n clients that sent an update, N the number of samples of these clients, D_test the server's proxy set.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lcfl.core.messages import Uplink
from lcfl.core.schema import Forms
from lcfl.core.state import FederationState
from lcfl.methods.aggregation.update_mean import updated_model
from lcfl.methods.clustering.base import Clustering, ServerInterface
from lcfl.methods.clustering.cluster_moves import drop_empty, keep_numbers
from lcfl.methods.clustering.similarity import cosine, leading_coordinates
from lcfl.models.layout import Layout
from lcfl.models.subset import ParameterSubset, layer_subset

__all__ = ["GreedyIncentive", "admits", "candidates_of", "representativeness", "update_similarity"]


@dataclass
class GreedyIncentive(Clustering):
    """Grows clusters from representative seeds, one client at a time, as long as the joint model passes a test.

    The clusters are formed anew in every round (AS-CFL Algorithm 1, lines 13 to 16). The seed is the unassigned client
    with the largest data-weighted similarity to the unassigned clients. The candidates are the 20 % of the unassigned
    clients that are most similar to the seed, at least one, in descending order of similarity. A candidate is tested
    by the accuracy on D_test of the weighted mean of its own model and the models of all members. The first candidate
    that fails ends the cluster. If all candidates are admitted, more candidates are drawn. The remaining clients begin
    the next cluster with a new seed.

    The similarity is the cosine of the updates of the output layer (the network's decision head) in the leading
    components that explain 95 % of their variance. The paper's formula instead factorises the matrix of similarities,
    M = U Sigma V^T, with that many components. `factorised` can select this literal reading (reading A31).

    The paper's test, rule ``strict``, requires an accuracy above theta that also rises by the margin. From an untrained
    model no candidate ever passes it, and above theta hardly any can. ``relative`` admits a candidate if the accuracy
    is at least theta times the best accuracy of any model tested in this round, and falls by no more than the margin
    (reading A10).

    Clusters are matched one to one with the previous ones, so that as many clients as possible keep their number. A
    client without an update keeps its cluster number. Its old cluster stays as it is if no new cluster has that number.

    Without a proxy set (``data.proxy``) it warns and uses similarity alone, as with `incentive` false.

    Args:
        theta: the threshold of the rule.
        margin: the margin of the rule, an accuracy from 0 to 1.
        rule: ``relative`` or ``strict``.
        incentive: whether candidates are tested. False admits all candidates of the first draw untested (the paper's
            variant "w/o positive incentive").
        candidates: the share of the unassigned clients that become candidates.
        explained_variance: the share of variance that the leading components explain. None compares the updates
            themselves ("w/o low-rank").
        factorised: ``updates``, or ``similarities`` for the matrix of their cosines. Without `explained_variance` the
            two are the same.
        layers: ``output`` (the decision head), ``all`` for the whole update, or patterns of layers, each with
            everything inside it.
        once: whether clusters are formed in the first round and then stay. Clients without an update in that round stay
            in cluster 0.
    """

    theta: float = 0.85
    margin: float = 0.03
    rule: Literal["relative", "strict"] = "relative"
    incentive: bool = True
    candidates: float = 0.2
    explained_variance: float | None = 0.95
    factorised: Literal["updates", "similarities"] = "updates"
    layers: str | list[str] = "output"
    once: bool = False

    reads: ClassVar[tuple[str, ...]] = ("update",)
    remembers: ClassVar[Forms] = {"done": bool}

    def __post_init__(self) -> None:
        for name in ("theta", "candidates", "explained_variance"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"GreedyIncentive: got {name}={value}; it must lie in (0, 1].")
        if not 0 <= self.margin < 1:
            raise ValueError(f"GreedyIncentive: got margin={self.margin}; it must lie in [0, 1).")
        if not self.layers:
            raise ValueError("GreedyIncentive: got layers=[]; give output, all, or the name of at least one layer.")
        self.forget()

    def forget(self) -> None:
        """Forgets the last run."""
        self._done = False

    @property
    def needs_everyone(self) -> str | None:
        """Only if `once` is set, because there is no second round in which to find a cluster."""
        if not self.once:
            return None
        return "with once=true, clients that miss the first round stay in cluster 0. Set once=false."

    def on_fit_start(self, server: ServerInterface) -> None:
        """Warns if no candidate can be tested."""
        if self.incentive and not server.has_proxy:
            warnings.warn(
                "GreedyIncentive: without a proxy set no candidate can be tested, so all are admitted by similarity "
                "alone, as with incentive: false. Set data.proxy, e.g. to 1000, if there are official test samples.",
                stacklevel=2,
            )

    def check_layout(self, layout: Layout) -> None:
        """Checks that the network has the layers that are compared."""
        if self.layers == "output" and layout.num_embedding == layout.num_parameters:
            raise ValueError(
                "method.clustering: GreedyIncentive got layers=output, but model.cut and model.trainable leave no "
                "decision head that is trained. Set layers=all."
            )
        try:
            self._compared(layout)
        except ValueError as error:
            raise ValueError(f"method.clustering: GreedyIncentive.layers: {error}") from None

    def on_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Forms new clusters of the clients whose updates have arrived."""
        if not uploads or (self.once and self._done):
            return
        layout = server.layout
        compared = self._compared(layout)
        update_nP = torch.stack([compared.take(upload.payload["update"]) for upload in uploads])
        groups = self._grow(server, uploads, update_similarity(update_nP, self.explained_variance, self.factorised))
        _take_over(state, [upload.client for upload in uploads], groups)
        self._done = True

    def _compared(self, layout: Layout) -> ParameterSubset:
        """Returns where the parameters of the compared layers lie."""
        if self.layers in ("output", "all"):
            begin = layout.num_embedding if self.layers == "output" else 0
            return ParameterSubset((slice(begin, layout.num_parameters),))
        return layer_subset(layout, [self.layers] if isinstance(self.layers, str) else self.layers, with_buffers=False)

    def _grow(self, server: ServerInterface, uploads: Sequence[Uplink], similarity_nn: Tensor) -> list[list[int]]:
        """Returns the clusters as positions in `uploads`, in the order in which they were begun."""
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
                left = [position for position in left if position not in group]
                is_open = tested and admitted == len(drawn)
            groups.append(group)
        server.log("cluster/admitted", len(uploads) - len(groups))
        server.log("cluster/tested_models", trial.num_tested)
        return groups


class _Trial:
    """Tests candidates on the proxy set and keeps the best accuracy of the round so far."""

    def __init__(
        self, server: ServerInterface, uploads: Sequence[Uplink], theta: float, margin: float, rule: str
    ) -> None:
        self.server, self.uploads = server, uploads
        self.theta, self.margin, self.rule = theta, margin, rule
        self.best = self.current = 0.0
        self.num_tested = 0

    def begin(self, seed: int) -> None:
        """Measures the model of a seed alone."""
        (self.current,) = self._accuracy([[seed]])
        self.best = max(self.best, self.current)

    def admitted(self, group: list[int], drawn: list[int]) -> int:
        """Returns how many of the candidates `drawn` join, one after the other, before the first one that fails.

        The models for all candidates are measured together, on all ranks. Results after the first failure are ignored.
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
        return self.server.proxy_score([updated_model([self.uploads[i] for i in group], layout) for group in groups])


def update_similarity(update_nP: Tensor, explained_variance: float | None, factorised: str) -> Tensor:
    """Returns sim(i, j) ``[n, n]`` of updates ``[n, P]`` in float64 (AS-CFL section 3.2.2; reading A31).

    Args:
        update_nP: the compared part of each client's update.
        explained_variance: determines the rank r, the number of components of the updates that explain this share of
            their variance; None for all components.
        factorised: ``updates`` for cosines in these components; ``similarities`` for M ~ U Sigma V^T of rank r, where
            M holds the cosines of the updates themselves.
    """
    code_nD = leading_coordinates(update_nP, explained_variance)
    if factorised == "updates":
        cosine_nn = cosine(code_nD, code_nD)
        cosine_nn = (cosine_nn + cosine_nn.T) / 2  # exact ties between clients must not depend on rounding
        return cosine_nn.diagonal_scatter(cosine_nn.diagonal().round())
    rank = code_nD.shape[1]
    whole_nD = leading_coordinates(update_nP, None)
    left_nn, scale_n, right_nn = torch.linalg.svd(cosine(whole_nD, whole_nD))
    cut_nn: Tensor = (left_nn[:, :rank] * scale_n[:rank]) @ right_nn[:rank]
    return cut_nn


def representativeness(similarity_nn: Tensor, weight_n: Tensor) -> Tensor:
    """Returns ``score_i = sum_j (n_j / N) sim(i, j)`` ``[n]`` over the given clients (AS-CFL section 3.2.2, step i)."""
    return similarity_nn @ (weight_n / weight_n.sum())


def candidates_of(similarity_n: Tensor, left: Sequence[int], share: float) -> list[int]:
    """Returns the ceil(share of `left`) clients most similar to a seed, in descending order of similarity.

    In a tie the lower number comes first.
    """
    ranked = sorted(left, key=lambda client: (-float(similarity_n[client]), client))
    return ranked[: max(1, ceil(share * len(left) - 1e-9))]


def admits(accuracy: float, current: float, best: float, theta: float, margin: float, rule: str) -> bool:
    """Returns whether a candidate joins (AS-CFL Eq. 3 and section 3.2.1; reading A10).

    Args:
        accuracy: the accuracy of the model with the candidate.
        current: the accuracy of the model without the candidate.
        best: the best accuracy of any model tested in this round, including this one.
        theta: the threshold (``strict``), or the share of the best accuracy (``relative``).
        margin: how much the accuracy must rise (``strict``) or may fall (``relative``).
        rule: ``strict`` or ``relative``.
    """
    if rule == "strict":
        return accuracy > theta and accuracy >= current + margin
    return accuracy >= theta * best and accuracy >= current - margin


def _take_over(state: FederationState, clients: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
    """Gives each group the number of its cluster as `keep_numbers` matches them, and drops empty clusters.

    Groups that match no cluster are numbered after the existing clusters.
    """
    before_n = state.assignment[list(clients)]
    label_n = torch.empty_like(before_n)
    for label, group in enumerate(groups):
        label_n[list(group)] = label
    kept_n = keep_numbers(state, clients, label_n)
    assignment, origins = state.assignment.clone(), list(range(state.num_clusters))
    for group in groups:
        number = int(kept_n[group[0]])
        if number not in before_n[list(group)]:  # starts from the old centre, because the aggregation makes the new one
            number = len(origins)
            origins.append(max(int(before_n[group[0]]), 0))
        assignment[[clients[position] for position in group]] = number
    state.assignment = assignment
    state.take_clusters(origins)
    drop_empty(state)
