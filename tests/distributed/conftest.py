"""Fixtures of hosts. The ranks of a test only seem to be apart."""

import pytest
import torch.distributed as dist

from lcfl.distributed.hosts import Host, Hosts
from lcfl.distributed.ranks import Ranks
from lcfl.distributed.worker import Worker
from tests.helpers.builders import blobs, blobs_module, lcfed, loaded


@pytest.fixture
def apart(monkeypatch):
    """Provides ``apart(per_host)``, after which so many ranks each seem to be on a host of their own."""
    return lambda per_host: monkeypatch.setattr(
        "lcfl.distributed.ranks._boot", lambda: str(dist.get_rank() // per_host)
    )


@pytest.fixture
def with_hosts(on_ranks, apart):
    """Provides ``with_hosts(number, function)``, which calls the function on the server with all hosts."""

    def session(fabric, flag, function):
        data, module = loaded(blobs(4)), blobs_module()
        worker = Worker(fabric, module, data, lcfed(), 0)
        ranks = Ranks(fabric, worker.run_all, flag)
        with ranks:
            if not fabric.is_global_zero:
                return Host(ranks, worker).serve()
            with Hosts(Host(ranks, worker)) as hosts:
                return function(hosts)

    apart(1)
    return lambda number, function: on_ranks(number, session, function)
