"""Addressed random streams: every draw is a function of a seed, a purpose and an address.

A stream depends only on an address such as ``(seed, "order", client, epoch)``. It does not depend on how many numbers
were drawn before, on the process that draws them, or on the order in which clients are visited. This is why a resumed
run, a run on more processes and a run with other callbacks give the same bits, although no checkpoint holds the state
of a generator.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["generator", "isolated", "seed_all", "seeded", "stream_seed"]


def stream_seed(seed: int, purpose: str, *address: int) -> int:
    """Returns the 128-bit seed of the stream at ``(seed, purpose, *address)``.

    Args:
        seed: the seed of the run (``seed_everything``) or of the partition (``data.seed``).
        purpose: what the stream is for, e.g. ``"sample"`` or ``"order"``.
        address: any further integers, e.g. round and client.
    """
    text = "/".join([str(int(seed)), purpose, *(str(int(part)) for part in address)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def generator(seed: int, purpose: str, *address: int) -> np.random.Generator:
    """Returns a numpy generator at the start of an addressed stream.

    A numpy generator uses all 128 bits of the seed, whereas torch's CPU generator keeps only 32.
    """
    return np.random.default_rng(stream_seed(seed, purpose, *address))


@contextmanager
def isolated() -> Iterator[None]:
    """Restores the states of the global generators on exit, whatever is drawn inside; see `seeded`."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    # CUDA is not initialised here, because a process that has not used it must still be able to fork.
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
def seeded(seed: int, purpose: str, *address: int) -> Iterator[None]:
    """Runs code that can only draw from global generators inside one addressed stream.

    Seeds Python's ``random``, numpy, torch and every CUDA device on entry, and restores their states on exit, even
    after an exception. Initialisation, dropout and torchvision transforms need it.
    """
    with isolated():
        seed_all(seed, purpose, *address)
        yield


def seed_all(seed: int, purpose: str, *address: int) -> None:
    """Puts all global generators at the start of an addressed stream, for code whose caller restores their states."""
    number = stream_seed(seed, purpose, *address)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number % 2**63)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number % 2**63)
