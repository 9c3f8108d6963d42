"""The order in which a client's training samples are drawn into batches."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lcfl.core import rng

__all__ = ["batch_positions", "samples_per_epoch"]


def samples_per_epoch(num_samples: int, batch_size: int, drop_last: bool) -> int:
    """Returns how many of a client's n_i samples one pass draws: all, or floor(n_i / B) B with `drop_last`.

    A client with fewer samples than B keeps its one short batch, because it would never train without it.
    """
    return num_samples // batch_size * batch_size if drop_last and num_samples >= batch_size else num_samples


def batch_positions(
    num_samples: int, batch_size: int, consumed: int, seed: int, client: int, drop_last: bool = False
) -> Iterator[NDArray[np.int64]]:
    """Yields batches without end, as positions into the client's training samples.

    Passes over the data follow one another. Pass p is shuffled by the stream ``(seed, "order", client, p)``. Its last
    batch may be short, unless `drop_last` leaves it out. The order depends only on how many samples the client has
    consumed before, so it continues where the last participation ended.

    Args:
        num_samples: n_i, at least 1.
        batch_size: B; a client with fewer samples draws batches of n_i.
        consumed: the number of samples drawn before, without those that were left out.
        seed: the run's seed.
        client: the number of the client.
        drop_last: whether to leave out the last batch of a pass if it is shorter than B; see `samples_per_epoch`.
    """
    length = samples_per_epoch(num_samples, batch_size, drop_last)
    epoch, position = divmod(consumed, length)
    while True:
        order = rng.generator(seed, "order", client, epoch).permutation(num_samples)[:length]
        while position < length:
            yield order[position : position + batch_size]
            position += batch_size
        epoch, position = epoch + 1, 0
