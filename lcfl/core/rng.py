"""Addressed random streams: every draw is a function of a seed, a purpose and an address.

A stream belongs to an address such as ``(seed, "order", client, epoch)`` and to nothing else: not to
how many numbers were drawn before, not to the process that draws them, not to the order in which
clients are visited. That is what makes a resumed run, a run on more processes and a run with other
callbacks give the same bits, without a generator's state in any checkpoint.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["generator", "preserved", "scope", "stream_seed"]


def stream_seed(seed: int, purpose: str, *address: int) -> int:
    """The 128-bit seed of the stream at ``(seed, purpose, *address)``.

    Args:
        seed: the run's seed (``seed_everything``) or the partition's own (``data.seed``).
        purpose: what the stream is for, e.g. ``"sample"`` or ``"order"``.
        address: any further integers, e.g. round and client.
    """
    text = "/".join([str(int(seed)), purpose, *(str(int(part)) for part in address)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def generator(seed: int, purpose: str, *address: int) -> np.random.Generator:
    """A numpy generator at the start of its addressed stream.

    numpy's, because it takes all 128 bits of the seed; torch's CPU generator keeps only 32 of them.
    """
    return np.random.default_rng(stream_seed(seed, purpose, *address))


@contextmanager
def preserved() -> Iterator[None]:
    """Whatever is drawn inside, the global generators go on behind it as if nothing had been; see `scope`."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    # Never initialises CUDA: a process that has not used it must still be able to fork.
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


@contextmanager
def scope(seed: int, purpose: str, *address: int) -> Iterator[None]:
    """Runs code that can only draw from global generators inside one addressed stream.

    Seeds Python's ``random``, numpy, torch and every CUDA device on entry and puts back what it
    found on exit, also after an exception. Initialisation, dropout and torchvision transforms need it.
    """
    number = stream_seed(seed, purpose, *address)
    with preserved():
        random.seed(number)
        np.random.seed(number % 2**32)
        torch.default_generator.manual_seed(number % 2**63)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number % 2**63)
        yield
