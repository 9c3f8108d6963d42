"""Clipping and Gaussian noise on uploads, and the privacy that they give.

Legend: C clipping norm, sigma standard deviation of the noise, P + Q length of a model's flat vector.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import exp, inf, pi, sqrt
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core.messages import all_finite
from lcfl.methods.exchange.transforms.base import UploadTransform
from lcfl.models.layout import Layout

__all__ = ["GaussianNoise", "PrivacyGuarantee", "clipped", "epsilon_of", "noise_multiplier_for", "secure_normal"]

MOST_DISTANCE = 1e6  # sensitivity over noise; epsilon is above 5e11 there


@dataclass(frozen=True)
class PrivacyGuarantee:
    """(epsilon, delta)-differential privacy of one client's data against everyone who sees the uploads.

    Attributes:
        epsilon: over all rounds.
        delta: over all rounds.
        sigma: the standard deviation of the noise on every number of an upload.
        clip: the norm that an upload is clipped to.
        uploads: the most uploads of any client.
    """

    epsilon: float
    delta: float
    sigma: float
    clip: float
    uploads: int

    def __str__(self) -> str:
        return (
            f"epsilon {self.epsilon:.4g}, delta {self.delta:.4g} for all data of one client, against everyone who sees "
            f"the uploads (at most {self.uploads}, clipped to {self.clip:.4g}, noise {self.sigma:.4g})"
        )


@dataclass(frozen=True)
class GaussianNoise(UploadTransform):
    """Clips Delta_i to the norm C and adds noise: ``Delta_i + N(0, sigma^2 I)`` (AS-CFL Algorithm 1, line 31).

    The paper states epsilon = 1 and delta = 1e-5, but neither a clipping norm nor sigma (reading A13). Without
    clipping, no noise gives a guarantee, because nothing bounds what one client's data can change.

    With a norm C, the guarantee covers all data of one client. Two federations are neighbours if they differ in one
    client's data, which moves each upload of that client by at most 2 C. The noise is added at the client before it
    sends. The guarantee therefore holds against everyone who sees all uploads and knows who sent them, the server
    included, and against everyone who sees what the server makes of them. It composes the uploads of the client that
    uploads most often and claims no amplification by sampling. The numbers of samples, the layers of the model and
    the clients of every round count as public. An update that is not finite is replaced by zeros, so such a client
    sends noise alone.

    Args:
        clip: C, the largest L2 norm of an upload; null for no clipping.
        sigma: the standard deviation of the noise; null for the smallest with which the whole run has `epsilon`.
        epsilon: the epsilon to reach; null if `sigma` is given.
        delta: the delta of the guarantee.
        before: what the noise is added before. ``upload``: the client adds it, so the clustering sees noisy uploads.
            ``aggregation``: the server adds it after the clustering, which is the order of the paper's algorithm
            (stage 3). The server and the clustering then see exact updates, so there is no guarantee.
        secure: whether the noise comes from the operating system's secure source. Then no two runs are equal, and a
            run cannot be resumed. Otherwise the noise follows from the run's seed, which must be kept secret.

    Raises:
        ValueError: unless exactly one of `sigma` and `epsilon` is given, or for a number outside its range.
    """

    clip: float | None = None
    sigma: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    before: Literal["upload", "aggregation"] = "upload"
    secure: bool = False

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
        """Clips all vectors together and adds noise to every number except integer buffers (batch counters).

        With ``before: aggregation`` it only clips.
        """
        if not all(map(all_finite, update.values())):  # to leave it out would show something about the client's data
            update = {name: torch.zeros_like(vector) for name, vector in update.items()}
        is_noisy = {name: _noisy_entries(vector, layout) for name, vector in update.items()}
        vectors = clipped({name: vector * is_noisy[name] for name, vector in update.items()}, self.clip)
        payload = {name: torch.where(is_noisy[name], vectors[name], update[name]) for name in update}
        if self.before == "upload":
            payload = self.add_noise(payload, layout, draw)
        return {name: vector.float() for name, vector in payload.items()}

    def add_noise(self, vectors: Mapping[str, Tensor], layout: Layout, draw: np.random.Generator) -> dict[str, Tensor]:
        """Returns the vectors with noise on every number except integer buffers, in float64."""
        assert self.sigma is not None, "sigma is calibrated before the first round"
        payload = {}
        for name, vector in vectors.items():
            normal = secure_normal(len(vector)) if self.secure else draw.standard_normal(len(vector))
            noisy = vector + torch.from_numpy(normal) * self.sigma
            payload[name] = torch.where(_noisy_entries(vector, layout), noisy, vector)
        return payload

    def calibrated(self, num_uploads: int) -> "GaussianNoise":
        """Returns the same transform with the sigma that gives `epsilon` over so many uploads of a client."""
        if self.clip is None or self.epsilon is None:
            return self
        sigma = 2 * self.clip * noise_multiplier_for(self.epsilon, self.delta, num_uploads)
        return replace(self, sigma=sigma, epsilon=None)

    def privacy_guarantee(self, num_uploads: int) -> PrivacyGuarantee | None:
        """Returns a bound on what so many uploads reveal about one client's data, or None if nothing bounds it."""
        if self.clip is None or not self.sigma or self.before != "upload":
            return None
        epsilon = epsilon_of(self.sigma / (2 * self.clip), self.delta, num_uploads)
        return PrivacyGuarantee(epsilon, self.delta, self.sigma, self.clip, num_uploads)


def clipped(vectors: Mapping[str, Tensor], norm: float | None) -> dict[str, Tensor]:
    """Returns the vectors in float64, scaled together by min(1, C / |all vectors|), or unscaled without a norm C."""
    doubles = {name: vector.double() for name, vector in vectors.items()}
    if norm is None:
        return doubles
    length = sum(float(vector.square().sum()) for vector in doubles.values()) ** 0.5
    scale = min(1.0, norm / length) if length > 0 else 1.0
    return {name: vector * scale for name, vector in doubles.items()}


def secure_normal(number: int) -> NDArray[np.float64]:
    """Returns standard normal numbers ``[number]``, made by Box and Muller's method from the system's secure source."""
    half = (number + 1) // 2
    whole = np.frombuffer(os.urandom(16 * half), dtype=np.uint64) >> np.uint64(11)
    uniform = (whole + np.uint64(1)) * 2.0**-53  # in (0, 1]
    length, angle = np.sqrt(-2 * np.log(uniform[:half])), 2 * pi * uniform[half:]
    return np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:number]


def epsilon_of(noise_multiplier: float, delta: float, num_uploads: int) -> float:
    """Returns the epsilon of a client's uploads if the noise is `noise_multiplier` times their sensitivity 2 C.

    Gaussian releases compose, adaptively too, like one release with 1 / sqrt(T) of the noise (Dong, Roth and Su, 2022,
    corollary 3.3). Its epsilon is exact (Balle and Wang, 2018, theorem 8).
    """
    from scipy.optimize import brentq  # imported here because only runs with noise need it

    distance = sqrt(num_uploads) / noise_multiplier
    if num_uploads == 0 or _delta_of(0.0, distance) <= delta:
        return 0.0
    most = distance**2 / 2 + distance * sqrt(-2 * np.log(delta))
    # With next to no noise, rounding decides, and exponentials overflow; the bound itself holds.
    if distance > MOST_DISTANCE or _delta_of(most, distance) >= delta:
        return float(most)
    return float(brentq(lambda epsilon: _delta_of(epsilon, distance) - delta, 0.0, most, xtol=1e-12))


@cache
def noise_multiplier_for(epsilon: float, delta: float, num_uploads: int) -> float:
    """Returns the least noise, in units of the sensitivity 2 C, with which a client's uploads have `epsilon`."""
    from scipy.optimize import brentq

    if num_uploads == 0:
        return 0.0
    least = most = 1.0
    while _delta_of(epsilon, least) > delta:
        least /= 2
    while _delta_of(epsilon, most) <= delta:
        most *= 2
    return sqrt(num_uploads) / float(brentq(lambda distance: _delta_of(epsilon, distance) - delta, least, most))


def _delta_of(epsilon: float, distance: float) -> float:
    """Returns the least delta of one Gaussian release: sensitivity over standard deviation is `distance`."""
    from scipy.special import log_ndtr

    upper, lower = (float(log_ndtr(sign * distance / 2 - epsilon / distance)) for sign in (1, -1))
    return exp(upper) - exp(epsilon + lower)


def _noisy_entries(vector: Tensor, layout: Layout) -> Tensor:
    is_noisy = torch.ones(len(vector), dtype=torch.bool)
    for entries in layout.integer_slices():
        is_noisy[entries] = False
    return is_noisy
