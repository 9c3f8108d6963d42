"""Formulas for the similarity of low-rank models, which the clusterings share.

Models are compared by their trained parameters alone, because frozen ones are equal in all of them.

Legend: n models, N clients, K clusters, P trained parameters, D components. Suffixes name the axes.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import normalize

__all__ = [
    "assign",
    "cosine",
    "cosine_silhouette",
    "squared_distances_to_means",
    "kl_divergence",
    "leading_coordinates",
    "principal_components",
    "project",
    "project_all",
    "spread",
    "squared_distances",
    "squared_distances_to_centres",
]

MOST_FITTED = 1000  # models that components are fitted to, as many as LCFed's offline phase trains
MODELS_AT_A_TIME = 32  # whole models, because one pass over a basis that is as large as many models should serve many
PART = 2**15  # entries of models that are projected together, so that they stay in a cache of the processor
CHUNK = 2**20  # columns at a time: the float64 copy of a chunk of 100 models takes 0.8 GB
EPSILON = 1e-12
VARIANCE_FLOOR = 1e-10  # share of the largest variance, below which a float32 model holds only rounding errors


def spread(clients: Sequence[int]) -> Sequence[int]:
    """Returns at most `MOST_FITTED` clients, evenly spread."""
    if len(clients) <= MOST_FITTED:
        return clients
    return [clients[i] for i in torch.linspace(0, len(clients) - 1, MOST_FITTED).round().long().tolist()]


def principal_components(model_nP: Tensor, dimension: int) -> Tensor:
    """Returns M ``[P, D]``: the first D principal components of n flattened models, as columns.

    Implements FedAC Algorithm 2 and LCFed section III-B. Uses the n x n Gram matrix of the centred models in float64,
    which takes n P memory instead of P squared. The sign of a component is fixed by its largest entry. Directions
    without variance are left out, so D is at most n - 1.

    Raises:
        ValueError: if the models do not differ at all, so that there is no component.
    """
    num_models = len(model_nP)
    mean_P = model_nP.mean(dim=0, dtype=torch.float64)
    gram_nn = torch.zeros(num_models, num_models, dtype=torch.float64)
    chunks = list(zip(model_nP.split(CHUNK, dim=1), mean_P.split(CHUNK), strict=True))
    for part, mean in chunks:
        centred = part.double() - mean
        gram_nn += centred @ centred.T
    variance_n, vector_nn = torch.linalg.eigh(gram_nn)
    order = variance_n.argsort(descending=True)[: min(dimension, num_models - 1)]
    order = order[variance_n[order] > variance_n.clamp(min=0).max() * VARIANCE_FLOOR]
    if len(order) == 0:
        raise ValueError("principal_components: the models are all equal; train them before a projection is fitted.")
    weight_nD = vector_nn[:, order] / variance_n[order].sqrt()
    parts = [(part.double() - mean).T @ weight_nD for part, mean in chunks]
    basis_PD = normalize(torch.cat(parts), dim=0).float()
    largest_D = basis_PD.abs().argmax(dim=0)
    return basis_PD * basis_PD[largest_D, torch.arange(basis_PD.shape[1])].sign()


def project(model_NP: Tensor, basis_PD: Tensor, offset_P: Tensor | None = None) -> Tensor:
    """Returns low-rank models ``[N, D]``: M^T w, or M^T (w - offset) (LCFed Eq. 4; reading A4)."""
    return (model_NP if offset_P is None else model_NP - offset_P) @ basis_PD


def project_all(models: Iterable[Tensor], basis_PD: Tensor, offset_P: Tensor | None = None) -> Tensor:
    """Applies `project` to models ``[P + Q]`` and returns ``[n, D]``. Buffers do not count.

    It works through the entries part by part, so that the models are not copied as a whole.
    """
    (size, dimension), stream = basis_PD.shape, iter(models)
    codes = [torch.zeros(0, dimension)]
    # All parts share this memory. Codes allocated in between would keep the memory of a freed part from being reused.
    part_nP = torch.empty(MODELS_AT_A_TIME * min(PART, size))
    while some := list(islice(stream, MODELS_AT_A_TIME)):
        code_nD = torch.zeros(len(some), dimension)
        for begin in range(0, size, PART):
            here = slice(begin, min(begin + PART, size))
            stacked_nP = part_nP[: len(some) * (here.stop - begin)].view(len(some), -1)
            torch.stack([model[here] for model in some], out=stacked_nP)
            code_nD += project(stacked_nP, basis_PD[here], None if offset_P is None else offset_P[here])
        codes.append(code_nD)
        del some  # before the next models are there
    return torch.cat(codes)


def cosine(code_ND: Tensor, centre_KD: Tensor) -> Tensor:
    """Returns the cosines ``[N, K]`` of rows: a.b / (|a| |b|), which is 0 for a row of zeros (LCFed Eq. 4).

    |a| |b| must be at least the smallest normal number of the dtype, 1e-38 in float32.
    """
    norms_NK = torch.outer(code_ND.norm(dim=1), centre_KD.norm(dim=1))
    return code_ND @ centre_KD.T / norms_NK.clamp(min=torch.finfo(norms_NK.dtype).tiny)


def cosine_silhouette(direction_nD: Tensor, label_n: Tensor) -> float:
    """Returns the mean silhouette of n unit vectors under the cosine distance 1 - x . y, with two labels or more.

    The distances of x to the members of a cluster add up to the number of members minus the inner product of x with the
    sum of the members, so no two vectors are compared. A vector alone in its cluster counts 0. A vector of zeros is at
    distance 1 from all others. Mean distances far below 1e-12, of directions that are equal to six digits, count as 0.
    """
    _, index_n, count_K = label_n.unique(return_inverse=True, return_counts=True)
    member_nK = torch.nn.functional.one_hot(index_n).to(direction_nD)
    distance_nK = count_K - direction_nD @ (direction_nD.T @ member_nK)
    to_itself_n = 1 - direction_nD.square().sum(dim=1)
    others_n = count_K[index_n] - 1
    within_n = (distance_nK.gather(1, index_n.unsqueeze(1)).squeeze(1) - to_itself_n) / others_n.clamp(min=1)
    between_n = (distance_nK / count_K).masked_fill(member_nK.bool(), torch.inf).amin(dim=1)
    score_n = (between_n - within_n) / torch.maximum(within_n, between_n).clamp(min=EPSILON)
    return float(torch.where(others_n > 0, score_n, 0).mean())


def squared_distances_to_centres(models: Iterable[Tensor], centre_KP: Tensor) -> Tensor:
    """Returns |w - Omega|^2 of every model and centre ``[n, K]``. It sums over differences, so that equal centres tie.

    The buffers of the models do not count.
    """
    num_centres, num_parameters = centre_KP.shape
    far = [(model[:num_parameters] - centre_KP).square().sum(dim=1) for model in models]
    return torch.stack(far) if far else torch.zeros(0, num_centres)


def kl_divergence(count_NC: Tensor) -> Tensor:
    """Returns ``KL(p_i || p_j) = sum_c p_ic log(p_ic / p_jc)`` ``[N, N]`` of rows scaled to sum 1 (FedAC Fig. 2).

    The result is float64. It is infinite where client j lacks a class that client i has.
    """
    share_NC = count_NC.double() / count_NC.sum(dim=1, keepdim=True)
    entropy_N = torch.special.xlogy(share_NC, share_NC).sum(dim=1)
    cross_NN = torch.stack([torch.special.xlogy(row_C, share_NC).sum(dim=1) for row_C in share_NC])
    divergence_NN: Tensor = entropy_N.unsqueeze(1) - cross_NN
    return divergence_NN


def assign(similarity_NK: Tensor, current_N: Tensor) -> Tensor:
    """Returns R ``[N]``: the most similar cluster of each row (LCFed Eq. 3).

    In a tie the current cluster wins if there is one (not -1) and it is among the best. Otherwise the lowest number
    wins.
    """
    best_N = similarity_NK.max(dim=1).values
    current_ties_N = similarity_NK.gather(1, current_N.clamp(min=0).unsqueeze(1)).squeeze(1) == best_N
    current_ties_N &= current_N >= 0
    return torch.where(current_ties_N, current_N, similarity_NK.argmax(dim=1))


def leading_coordinates(row_nP: Tensor, explained: float | None) -> Tensor:
    """Returns U Sigma ``[n, r]`` of the truncated singular value decomposition of n rows (AS-CFL section 3.2.2).

    The result is float64. r is the smallest rank whose squared singular values sum up to the share `explained` of the
    total. None keeps all, so that inner products of these coordinates equal those of the rows. Uses the n x n Gram
    matrix. A matrix of zeros has rank 0.
    """
    gram_nn = torch.zeros(len(row_nP), len(row_nP), dtype=torch.float64)
    for part in row_nP.split(CHUNK, dim=1):
        wide = part.double()
        gram_nn += wide @ wide.T
    square_n, vector_nn = (ascending.flip(-1) for ascending in torch.linalg.eigh(gram_nn))
    square_n = square_n.clamp(min=0)
    share_n = square_n.cumsum(dim=0)
    rank = int((square_n > square_n[0] * VARIANCE_FLOOR).sum())
    if explained is not None and rank:
        rank = min(rank, int((share_n < explained * share_n[-1]).sum()) + 1)
    code_nD: Tensor = vector_nn[:, :rank] * square_n[:rank].sqrt()
    return code_nD * (gram_nn.diagonal() > 0).unsqueeze(1)  # rounding would give a row of zeros a direction


def squared_distances(row_nP: Tensor, power: float = 2.0) -> Tensor:
    """Returns |x_i - x_j|^2 of n rows ``[n, n]`` in float64, or the sum of another power of |x_ip - x_jp|.

    The distance of equal rows is 0. It sums over differences, because inner products would lose small distances between
    large rows.
    """
    total_nn = torch.zeros(len(row_nP), len(row_nP), dtype=torch.float64)
    for part in row_nP.split(CHUNK, dim=1):
        wide = part.double()
        total_nn += torch.cdist(wide, wide, p=power, compute_mode="donot_use_mm_for_euclid_dist").pow(power)
    return total_nn


def squared_distances_to_means(square_nn: Tensor, label_n: Tensor, num_clusters: int) -> Tensor:
    """Returns |x_i - c_k|^2 ``[n, K]`` to the means c_k of the rows with label k.

    It needs only the rows' `squared_distances`: |x_i - c_k|^2 = mean_j |x_i - x_j|^2 - 1/2 mean_jl |x_j - x_l|^2 over
    j and l in k. It is infinite where k is empty.
    """
    member_nK = torch.nn.functional.one_hot(label_n, num_clusters).double()
    share_nK = member_nK / member_nK.sum(dim=0)
    mean_nK = square_nn @ share_nK
    spread_K = (share_nK * mean_nK).sum(dim=0) / 2
    return (mean_nK - spread_K).clamp(min=0).nan_to_num(nan=torch.inf, posinf=torch.inf)
