"""Engines compute with one thread, as in every rank."""

import pytest

from lcfl.distributed.launch import one_thread


@pytest.fixture(scope="module", autouse=True)
def like_a_rank():
    """Limits torch to one thread. On a busy machine, several threads would wait for each other, for seconds in all."""
    with one_thread():
        yield
