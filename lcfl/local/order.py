"""The order in which a client's training samples are drawn into batches."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lcfl import rng

__all__ = ["batch_positions"]


def batch_positions(
    num_samples: int, batch_size: int, consumed: int, seed: int, client: int
) -> Iterator[NDArray[np.int64]]:
    """An endless supply of batches: positions into the client's training samples.

    Passes over the data follow one another; pass p is shuffled by the stream ``(seed, "order", client, p)``
    and its last batch may be short. The order depends on how many samples the client has consumed
    before and on nothing else, so it goes on where the last participation ended.

    Args:
        num_samples: n_i, at least 1.
        batch_size: B; a client with fewer samples draws batches of n_i.
        consumed: samples drawn before.
        seed: the run's seed.
        client: its number.
    """
    epoch, position = divmod(consumed, num_samples)
    while True:
        order = rng.generator(seed, "order", client, epoch).permutation(num_samples)
        while position < num_samples:
            yield order[position : position + batch_size]
            position += batch_size
        epoch, position = epoch + 1, 0
