"""The order in which a client's training samples are drawn into batches."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lcfl.core import rng

__all__ = ["batch_positions", "pass_length"]


def pass_length(num_samples: int, batch_size: int, drop_last: bool) -> int:
    """How many of a client's n_i samples one pass draws: all, or floor(n_i / B) B of them with `drop_last`.

    A client with fewer samples than B keeps its one short batch: it would never train without.
    """
    return num_samples // batch_size * batch_size if drop_last and num_samples >= batch_size else num_samples


def batch_positions(
    num_samples: int, batch_size: int, consumed: int, seed: int, client: int, drop_last: bool = False
) -> Iterator[NDArray[np.int64]]:
    """An endless supply of batches: positions into the client's training samples.

    Passes over the data follow one another; pass p is shuffled by the stream ``(seed, "order", client, p)``
    and its last batch may be short, unless `drop_last` leaves it out. The order depends on how many
    samples the client has consumed before and on nothing else, so it goes on where the last
    participation ended.

    Args:
        num_samples: n_i, at least 1.
        batch_size: B; a client with fewer samples draws batches of n_i.
        consumed: samples drawn before; those that were left out do not count.
        seed: the run's seed.
        client: its number.
        drop_last: leave out a pass's last batch where it is shorter than B; see `pass_length`.
    """
    length = pass_length(num_samples, batch_size, drop_last)
    epoch, position = divmod(consumed, length)
    while True:
        order = rng.generator(seed, "order", client, epoch).permutation(num_samples)[:length]
        while position < length:
            yield order[position : position + batch_size]
            position += batch_size
        epoch, position = epoch + 1, 0
