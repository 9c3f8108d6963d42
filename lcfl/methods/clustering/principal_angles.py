"""Clusters by the angles between the subspaces of the clients' data, formed once before training (PACFL).

Legend: N clients, K clusters, D values of a sample, p vectors of a client's signature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from lcfl.core.messages import Downlink, Uplink
from lcfl.core.schema import Array, Forms, Number
from lcfl.core.state import FederationState
from lcfl.methods.clustering.agglomerative import Linkage, check_options, cut_tree
from lcfl.methods.clustering.base import Clustering, ExtraRound, NewcomerInterface, ServerInterface, check_num_clusters
from lcfl.methods.exchange import Signature
from lcfl.methods.local.signature import FLOOR, PixelSignature

__all__ = ["PrincipalAngles", "angle_between", "angles"]

Angle = Literal["vector_min", "principal", "trace"]


def angle_between(signature_Dp: Tensor, other_Dq: Tensor, angle: Angle) -> float:
    """Returns an angle between two signatures in degrees.

    The angle lies between 0 and 90 (``trace``: 90 times the number of vectors of the smaller signature).
    ``vector_min`` is the smallest angle between any vector of one signature and any vector of the other, as in the
    authors' code. Here it is an angle between lines, because the sign of a singular vector is arbitrary (reading A23).
    ``principal`` is the smallest principal angle of the two spaces. ``trace`` is the sum of the angles between vectors
    at the same place, tr(arccos |U_i^T U_j|), for as many as the smaller signature has. A signature without vectors is
    at a right angle to all others.
    """
    return _between(_units(signature_Dp, angle), _units(other_Dq, angle), angle)


def angles(signatures: Sequence[Tensor], angle: Angle) -> NDArray[np.float64]:
    """Returns the angles ``[N, N]`` in degrees between all signatures: symmetric, with a diagonal of zeros."""
    matrix = np.zeros((len(signatures), len(signatures)))
    units = [_units(signature, angle) for signature in signatures]
    for i, one in enumerate(units):
        for j in range(i):
            matrix[i, j] = matrix[j, i] = _between(one, units[j], angle)
    return matrix


def _units(signature_Dp: Tensor, angle: Angle) -> Tensor:
    """Returns the vectors at length 1; for ``principal``, an orthonormal basis of what those of all labels span."""
    vector_Dp = signature_Dp.double()
    if angle != "principal" or vector_Dp.shape[1] == 0:
        return normalize(vector_Dp, dim=0)
    left_Dp, value_p, _ = torch.linalg.svd(vector_Dp, full_matrices=False)
    basis_Dp: Tensor = left_Dp[:, value_p > FLOOR * value_p[0]]
    return basis_Dp


def _between(unit_Dp: Tensor, other_Dq: Tensor, angle: Angle) -> float:
    """Returns `angle_between` from the `_units` of both signatures."""
    if unit_Dp.shape[1] == 0 or other_Dq.shape[1] == 0:
        return 90.0
    cosine_pq = unit_Dp.T @ other_Dq
    if angle == "principal":
        cosine = torch.linalg.svdvals(cosine_pq)[0]
    else:
        cosine = cosine_pq.abs().max() if angle == "vector_min" else cosine_pq.abs().diagonal()
    return float(torch.rad2deg(cosine.clamp(0, 1).acos()).sum())


ANGLE_RULE = "the cluster whose members' data have the smallest angle to the newcomer's data"


@dataclass
class PrincipalAngles(Clustering):
    """Clusters all clients once by the angles between the signatures of their data (PACFL).

    Before the first round every client sends the `PixelSignature` of its training data. No client trains. Agglomerative
    clustering of the angles gives clusters that stay and that all begin at the common initial model. If
    ``data.newcomers`` keeps clients out, the signatures stay in the state until these clients join. Without them, the
    training loss decides where a newcomer belongs.

    Args:
        num_vectors: p, the number of singular vectors per label.
        angle: ``vector_min``, ``principal`` or ``trace``; see `angle_between`.
        linkage: ``average`` (UPGMA), ``weighted`` (WPGMA, the authors' loop), ``complete`` or ``single``.
        threshold: an angle in degrees. Clusters farther apart are not joined. Give this or `num_clusters`.
        num_clusters: K.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    remembers: ClassVar[Forms] = {"signatures": {Number(int, 0, "N"): Array(("values", None))}}

    num_vectors: int = 3
    angle: Angle = "vector_min"
    linkage: Linkage = "average"
    threshold: float | None = None
    num_clusters: int | None = 4

    def __post_init__(self) -> None:
        if self.num_vectors < 1:
            raise ValueError(f"PrincipalAngles: got num_vectors={self.num_vectors}; it must be at least 1.")
        if (self.threshold is None) == (self.num_clusters is None):
            raise ValueError(
                f"PrincipalAngles: got threshold={self.threshold}, num_clusters={self.num_clusters}; give exactly one "
                "and set the other to null."
            )
        check_options("PrincipalAngles", self.linkage, self.threshold, self.num_clusters, None, euclidean=False)
        self.forget()

    def forget(self) -> None:
        """Forgets the last run."""
        self._signatures: dict[int, Tensor] = {}

    def check(self, num_clients: int) -> None:
        """Checks that K is at most N."""
        check_num_clusters(self, self.num_clusters, num_clients)

    def warmup_rounds(self, num_clients: int) -> list[ExtraRound]:
        """Returns the warm-up round in which every client sends its signature."""
        return [ExtraRound(range(num_clients), PixelSignature(self.num_vectors), Signature())]

    def on_extra_round_end(self, server: ServerInterface, state: FederationState, uploads: Sequence[Uplink]) -> None:
        """Sets R, and K centres at the initial model."""
        if not uploads:
            raise ValueError(
                "PrincipalAngles: got no finite signature: every client holds samples with NaN or infinity."
            )
        matrix = angles([upload.payload["signature"] for upload in uploads], self.angle)
        number = None if self.num_clusters is None else min(self.num_clusters, len(uploads))
        cut = cut_tree(matrix, self.linkage, self.threshold, number)
        state.assignment = torch.full_like(state.assignment, -1)
        state.assignment[[upload.client for upload in uploads]] = torch.from_numpy(cut.labels)
        state.centres = state.initial.repeat(cut.num_clusters, 1)
        if not state.active.all():
            self._signatures = {upload.client: upload.payload["signature"] for upload in uploads}
        server.log("cluster/threshold", cut.threshold)

    @property
    def newcomer_rule(self) -> str:
        """What `place_newcomer` does: signatures are kept only if the run kept newcomers out."""
        return ANGLE_RULE if self._signatures else super().newcomer_rule

    def place_newcomer(self, newcomer: NewcomerInterface, state: FederationState) -> int:
        """Returns the cluster at the smallest angle by the rule of `linkage`, where all members weigh the same.

        The newcomer uploads its signature.
        """
        uplink = newcomer.run(Downlink({}), Signature(), PixelSignature(self.num_vectors))
        own = _units(uplink.payload["signature"], self.angle)
        angles_k: dict[int, list[float]] = {}
        for client, signature in self._signatures.items():
            if state.active[client]:
                angle = _between(own, _units(signature, self.angle), self.angle)
                angles_k.setdefault(int(state.assignment[client]), []).append(angle)
        if not angles_k:  # no signature is known, or all clients whose signatures are known have left
            return super().place_newcomer(newcomer, state)
        far = {"single": min, "complete": max}.get(self.linkage, mean)
        return min(sorted(angles_k), key=lambda cluster: far(angles_k[cluster]))
