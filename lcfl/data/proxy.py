"""The proxy set: official test samples that the server keeps."""

import warnings
from dataclasses import replace

import numpy as np

from lcfl.core import rng
from lcfl.core.validation import abbreviated
from lcfl.data.partition.base import Indices
from lcfl.data.protocols import Split

__all__ = ["without_proxy"]


def without_proxy(split: Split, size: int) -> tuple[Split, Indices]:
    """Draws the proxy set from the stream (seed, "proxy"), without the clients' own test samples.

    Args:
        split: the clients' shares and the official test samples.
        size: number of samples to draw, 0 for none.

    Returns:
        The split without the proxy set's official test samples, and the proxy set in ascending order.

    Raises:
        ValueError: if this leaves no official test samples.
    """
    if size == 0:
        return split, split.official[:0]
    free = np.setdiff1d(split.official, np.concatenate(split.held_out))
    if size >= len(free):
        raise ValueError(
            f"data.proxy takes {size} official test samples and must leave some for testing, but {len(free)} are free; "
            "lower data.proxy, or use a data set with official test samples and data.pool: train"
        )
    proxy = np.sort(rng.generator(split.seed, "proxy").choice(free, size, replace=False))
    missing = proxy[:0]
    if split.labels is not None:
        missing = np.setdiff1d(split.labels[np.concatenate(split.train)], split.labels[proxy])
    if len(missing):
        warnings.warn(
            f"data.proxy: the {size} samples of the proxy set have none of the {len(missing)} labels "
            f"{abbreviated(missing, 10)}, which clients learn. A test on the proxy set therefore ignores these labels. "
            "Raise data.proxy.",
            stacklevel=2,
        )
    return replace(split, official=np.setdiff1d(split.official, proxy)), proxy
