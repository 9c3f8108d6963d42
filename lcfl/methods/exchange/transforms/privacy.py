"""Clipping and Gaussian noise on uploads, and the privacy that they give.

Legend: N clients, C clipping norm, sigma standard deviation of the noise, P + Q length of a model's flat vector.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lcfl.methods.exchange.transforms.base import ReleaseCounts, UploadTransform
from lcfl.models.layout import Layout

__all__ = ["GaussianNoise", "PrivacyGuarantee", "clipped", "epsilon_of", "noise_multiplier_for"]

LEAST_MULTIPLIER = 0.1  # with less noise, epsilon is in the hundreds and its computation overflows


@dataclass(frozen=True)
class PrivacyGuarantee:
    """(epsilon, delta)-differential privacy of one client's data against everything that the run released.

    Attributes:
        epsilon: over all rounds.
        delta: over all rounds.
        sigma: the standard deviation of the noise on every number of an upload.
        clip: the norm that an upload is clipped to.
    """

    epsilon: float
    delta: float
    sigma: float
    clip: float

    def __str__(self) -> str:
        return (
            f"epsilon {self.epsilon:.4g}, delta {self.delta:.4g} for all data of one client "
            f"(clipped to {self.clip:.4g}, noise {self.sigma:.4g})"
        )


@dataclass(frozen=True)
class GaussianNoise(UploadTransform):
    """Clips Delta_i to the norm C and adds noise: ``Delta_i + N(0, sigma^2 I)`` (AS-CFL Algorithm 1, line 31).

    The paper states epsilon = 1 and delta = 1e-5, but neither a clipping norm nor sigma (reading A13). Without
    clipping, no noise gives a guarantee, because nothing bounds what one client's data can change.

    With a norm C, the guarantee covers all data of one client. Two sets of N clients are neighbours if they differ in
    one client's data, which moves the upload of that client by at most 2 C. The Renyi accountant of Google's
    ``dp-accounting`` composes the guarantee over all rounds, in each of which |S_t| of N clients are drawn anew. The
    guarantee therefore holds against observers who do not see which clients took part. The numbers of samples and the
    layers that a model has count as public. The noise is added at the client before it sends, not at the server when
    it sums the uploads, so the clustering sees only noisy uploads.

    Args:
        clip: C, the largest L2 norm of an upload; null for no clipping.
        sigma: the standard deviation of the noise; null for the smallest with which the whole run has `epsilon`.
        epsilon: the epsilon to reach; null if `sigma` is given.
        delta: the delta of the guarantee.

    Raises:
        ValueError: unless exactly one of `sigma` and `epsilon` is given, or for a number outside its range.
    """

    clip: float | None = None
    sigma: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if (self.sigma is None) == (self.epsilon is None):
            raise ValueError(
                f"GaussianNoise: got sigma={self.sigma}, epsilon={self.epsilon}; set exactly one and leave the other "
                "null."
            )
        if self.epsilon is not None and self.clip is None:
            raise ValueError(
                f"GaussianNoise: got epsilon={self.epsilon} without clip; only clipped uploads have an epsilon. "
                "Set clip."
            )
        for name in ("clip", "epsilon"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"GaussianNoise: got {name}={value}; it must be a positive number.")
        if not 0 < self.delta < 1 or (self.sigma is not None and not 0 <= self.sigma < inf):
            raise ValueError(
                f"GaussianNoise: got sigma={self.sigma}, delta={self.delta}; allowed are sigma >= 0 and 0 < delta < 1."
            )
        if self.clip is None:
            warnings.warn(
                f"GaussianNoise: sigma={self.sigma} without clip gives no privacy guarantee, because nothing bounds "
                "what one client's data can change. Set clip.",
                stacklevel=3,
            )

    def encode(self, update: Mapping[str, Tensor], layout: Layout, draw: np.random.Generator) -> Mapping[str, Tensor]:
        """Clips all vectors together and adds noise to every number except integer buffers (batch counters)."""
        assert self.sigma is not None, "sigma is calibrated before the first round"
        is_noisy = {name: _noisy_entries(vector, layout) for name, vector in update.items()}
        vectors = clipped({name: vector * is_noisy[name] for name, vector in update.items()}, self.clip)
        payload = {}
        for name, vector in vectors.items():
            noise = torch.from_numpy(draw.standard_normal(len(vector))) * self.sigma
            payload[name] = torch.where(is_noisy[name], (vector + noise).float(), update[name])
        return payload

    def calibrated(self, releases: ReleaseCounts) -> "GaussianNoise":
        """Returns the same transform with the sigma that gives `epsilon` over these releases.

        Raises:
            ImportError: if uploads are clipped and ``dp-accounting`` is not installed.
        """
        if self.clip is None:
            return self
        _accounting()  # a missing package is reported before the run, not at its end
        if self.epsilon is None:
            return self
        sigma = 2 * self.clip * noise_multiplier_for(self.epsilon, self.delta, releases)
        return replace(self, sigma=sigma, epsilon=None)

    def privacy_guarantee(self, releases: ReleaseCounts) -> PrivacyGuarantee | None:
        """Returns a bound on what these releases reveal about one client's data, or None if nothing bounds it."""
        if self.clip is None or not self.sigma:
            return None
        epsilon = epsilon_of(self.sigma / (2 * self.clip), self.delta, releases)
        return PrivacyGuarantee(epsilon, self.delta, self.sigma, self.clip)


def clipped(vectors: Mapping[str, Tensor], norm: float | None) -> dict[str, Tensor]:
    """Returns the vectors in float64, scaled together by min(1, C / |all vectors|), or unscaled without a norm C."""
    doubles = {name: vector.double() for name, vector in vectors.items()}
    if norm is None:
        return doubles
    length = sum(float(vector.square().sum()) for vector in doubles.values()) ** 0.5
    scale = min(1.0, norm / length) if length > 0 else 1.0
    return {name: vector * scale for name, vector in doubles.items()}


def epsilon_of(noise_multiplier: float, delta: float, releases: ReleaseCounts) -> float:
    """Returns the epsilon of a run whose noise is `noise_multiplier` times the sensitivity 2 C of the uploads."""
    accountant = _accountant()
    accountant.compose(_event(noise_multiplier, releases))
    return float(accountant.get_epsilon(delta))


@cache  # the computation takes seconds if clients are sampled
def noise_multiplier_for(epsilon: float, delta: float, releases: ReleaseCounts) -> float:
    """Returns the least noise, in units of the sensitivity 2 C, with which a run has at most `epsilon`."""
    if releases.rounds + releases.warmup_rounds == 0:
        return 0.0
    if epsilon_of(LEAST_MULTIPLIER, delta, releases) <= epsilon:
        return LEAST_MULTIPLIER
    dp = _accounting()
    bracket = dp.LowerEndpointAndGuess(LEAST_MULTIPLIER, 1.0)
    multiplier = dp.calibrate_dp_mechanism(
        _accountant, lambda guess: _event(guess, releases), epsilon, delta, bracket, tol=1e-4
    )
    return float(multiplier)


def _event(noise_multiplier: float, releases: ReleaseCounts) -> Any:
    dp = _accounting()
    gaussian = dp.GaussianDpEvent(noise_multiplier)
    sampled = dp.SampledWithoutReplacementDpEvent(releases.num_clients, releases.clients_per_round, gaussian)
    warmup = [dp.SelfComposedDpEvent(gaussian, releases.warmup_rounds)] if releases.warmup_rounds else []
    return dp.ComposedDpEvent([dp.SelfComposedDpEvent(sampled, releases.rounds), *warmup])


def _accountant() -> Any:
    dp = _accounting()
    return dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)


def _accounting() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError(
            "GaussianNoise with clip computes its privacy cost with the package dp-accounting, which is not installed: "
            "pip install 'lcfl[privacy]'"
        ) from error
    return dp_accounting


def _noisy_entries(vector: Tensor, layout: Layout) -> Tensor:
    is_noisy = torch.ones(len(vector), dtype=torch.bool)
    for entries in layout.integer_slices():
        is_noisy[entries] = False
    return is_noisy
