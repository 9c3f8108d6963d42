"""Messages between ranks arrive unchanged, without pickled tensors, and leave no file behind."""

import os
import tempfile
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lcfl.distributed import connections
from lcfl.distributed.connections import NetworkConnection, SharedMemoryConnection, balance, pack, unpack
from lcfl.distributed.launch import LostRankError
from tests.helpers.bits import same

KINDS = [SharedMemoryConnection, NetworkConnection]


@dataclass(frozen=True)
class Message:
    name: str
    content: Any


def tensors():
    """Returns one tensor of each kind that may cause trouble."""
    return {
        "float": torch.tensor([1 / 3, float("inf"), -0.0, float("nan")]),
        "double": torch.full((2, 3), 1 / 7, dtype=torch.float64),
        "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "half": torch.tensor([[0.25]], dtype=torch.float16),
        "int": torch.tensor([2**62, -1]),
        "small int": torch.tensor([-128, 127], dtype=torch.int8),
        "bool": torch.tensor([[True, False], [False, True]]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "strided": torch.arange(10)[::3],
        "expanded": torch.tensor([7.0]).expand(5),
        "gradient": torch.ones(3, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


# balance


@given(st.lists(st.integers(0, 20), max_size=7), st.integers(1, 3))
def test_balance_places_every_task_once_and_is_close_to_the_optimum(costs, num_ranks):
    shares = balance(costs, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(task for share in shares for task in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    best = min(
        max(sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == each) for each in range(num_ranks))
        for ranks in product(range(num_ranks), repeat=len(costs))
    )
    largest = max(sum(costs[task] for task in share) for share in shares)
    assert 3 * num_ranks * largest <= (4 * num_ranks - 1) * best  # Graham (1969), longest task first


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=100), st.integers(1, 20))
def test_no_rank_is_idle_while_another_has_two_tasks(costs, num_ranks):
    sizes = [len(share) for share in balance(costs, num_ranks)]
    assert min(sizes) >= 1 or max(sizes) <= 1


def test_equal_tasks_are_dealt_out_in_turn():
    assert balance([1, 1, 1, 1, 1], 2) == [[0, 2, 4], [1, 3]]
    assert balance([1, 5, 1, 1, 2], 2) == [[1], [0, 2, 3, 4]]
    assert balance([], 2) == [[], []]


# pack, unpack


def test_unpack_inverts_pack():
    message = Message("outer", [Message("inner", tensors()), (None, 3, "x", b"\0", {"deep": [torch.ones(2)]})])
    assert same(message, unpack(*pack(message)))


def test_a_tensor_that_occurs_twice_is_sent_once_and_shared_again():
    model, other = torch.rand(5), torch.rand(5)
    message = [model, {"again": model, "view": model[:]}, other, model[:3], model.view(torch.int32)]
    content, sent = pack(message)
    assert len(sent) == 4  # the model, the other, its first three, its bits
    back = unpack(content, sent)
    assert back[0] is back[1]["again"] is back[1]["view"]
    assert same(message, back)


def test_equal_tensors_in_different_memory_stay_separate():
    one, other = unpack(*pack([torch.ones(3), torch.ones(3)]))
    one.zero_()
    assert other.tolist() == [1, 1, 1]


def test_the_numbers_are_not_in_the_pickle():
    content, sent = pack(Message("x", torch.rand(10_000)))
    assert len(content) < 500
    assert [tensor.numel() for tensor in sent] == [10_000]


def test_tensors_to_send_are_plain_and_contiguous():
    _, sent = pack(tensors())
    assert all(tensor.is_contiguous() and not tensor.requires_grad and tensor.device.type == "cpu" for tensor in sent)


# links between two real processes


def link_of(kind, fabric):
    return kind(1 - fabric.global_rank, dist.new_group(backend="gloo"))


def echo(link, number):
    """Sends back every message that it receives, together with another tensor."""
    for _ in range(number):
        message = link.receive()
        link.send((message, torch.tensor(1)))


def exchange(fabric, flag, kind):
    """Sends messages there and back: growing, shrinking, empty, and growing again."""
    link = link_of(kind, fabric)
    messages = [
        tensors(),
        None,
        Message("big", [torch.rand(1000, 70), torch.arange(100_001)]),
        [],
        {"bool": torch.tensor(True)},
        Message("bigger", torch.rand(300_000)),
        torch.empty(0),
        tensors(),
        "x" * 100_000,
    ]
    if fabric.global_rank == 1:
        return echo(link, len(messages))
    results = []
    for message in messages:
        link.send(message)
        back, own = link.receive()
        results.append(same(message, back) and own.tolist() == 1)
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_any_size_go_there_and_back(on_ranks, kind):
    assert on_ranks(2, exchange, kind) == [True] * 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_valid_after_the_next_message(on_ranks, kind):
    def work(fabric, flag):
        link = link_of(kind, fabric)
        if fabric.global_rank == 1:
            return echo(link, 2)
        link.send(torch.zeros(1000))
        (first, _), _ = link.receive(copy=True), link.send(torch.ones(1000))
        (second, _) = link.receive()
        return first.sum().item(), second.sum().item()

    assert on_ranks(2, work) == (0, 1000)


def test_without_a_copy_nothing_is_copied(on_ranks):
    def work(fabric, flag):
        link = link_of(SharedMemoryConnection, fabric)
        if fabric.global_rank == 1:
            return echo(link, 2)
        link.send(torch.zeros(1000))
        (first, _) = link.receive()
        link.send(torch.ones(1000))
        link.receive()
        return first.sum().item()

    assert on_ranks(2, work) == 1000  # the memory is reused: it is valid until the next `receive`, as documented


def test_a_peer_that_ends_before_its_message_is_read_is_named(on_ranks):
    def work(fabric, flag):
        link = link_of(SharedMemoryConnection, fabric)
        if fabric.global_rank == 1:
            with pytest.raises(LostRankError, match=r"rank 0 was lost, .* \(it ended before its message"):
                link.receive()
        else:
            write = link._write
            link._write = lambda tensors: (write(tensors), link._file.close())[0]  # as when the process has ended
            link.send(torch.zeros(1000))
        fabric.barrier()

    on_ranks(2, work)


def no_room_in(folders, monkeypatch):
    """Makes the allocation of files in these folders fail."""
    real = os.posix_fallocate

    def fallocate(descriptor, offset, length):
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(tuple(folders)):
            raise OSError(28, "No space left on device")
        real(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)


def recording(kind, fabric, flag):
    """Runs `exchange` and returns its results and the folders of its files. Checks that the files have no name."""
    folders, allocate = [], connections.unlinked_memory

    def allocate_and_note(candidates, num_bytes, what):
        file, memory = allocate(candidates, num_bytes, what)
        assert os.stat(file.fileno()).st_nlink == 0 and len(memory) == num_bytes
        folders.append(os.path.dirname(os.readlink(f"/proc/self/fd/{file.fileno()}")))
        return file, memory

    connections.unlinked_memory = allocate_and_note
    results = exchange(fabric, flag, kind)
    fabric.barrier()
    assert len(folders) >= 2, "the memory has to grow at least once"
    return results, sorted(set(folders))


def test_no_file_can_be_left_behind(on_ranks):
    results, folders = on_ranks(2, lambda fabric, flag: recording(SharedMemoryConnection, fabric, flag))
    assert results == [True] * 9
    assert folders == ["/dev/shm"]


def test_a_small_dev_shm_is_replaced_by_the_temporary_folder(on_ranks, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    no_room_in(["/dev/shm"], monkeypatch)
    results, folders = on_ranks(2, lambda fabric, flag: recording(SharedMemoryConnection, fabric, flag))
    assert results == [True] * 9
    assert folders == [str(tmp_path)]


def test_no_room_anywhere_raises_an_error_and_leaves_no_file(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    no_room_in(["/"], monkeypatch)
    made, real = [], tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **kwargs: (made.append(real(**kwargs)), made[-1])[1])
    with pytest.raises(OSError, match=r"no room for 3 MiB of models to exchange between ranks in /dev/shm: No space"):
        SharedMemoryConnection(1, None)._write([torch.zeros(3 * 2**18)])
    assert len(made) == 2
    assert all(file.closed for file in made)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_reused_while_it_is_large_enough():
    link = SharedMemoryConnection(1, None)
    assert link._write([torch.ones(100), torch.ones(3)]) is not None
    assert len(link._out) == 448 + 64  # 400 and 12 bytes in whole cache lines
    assert link._write([torch.ones(10)]) is None
    assert link._write([]) is None
    assert link._write([torch.ones(200)]) is not None
    assert len(link._out) == 832
