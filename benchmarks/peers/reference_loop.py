"""A plain PyTorch loop: one network, load_state_dict per client, torch.optim.SGD, and a mean of state dicts.

    python -m peers.reference_loop [--workers 2] [--threads 1] [--channels_last]

With workers, the clients of a round are distributed over permanent processes, with parameters in shared memory.
"""

import argparse
import multiprocessing
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

from peers.common import Gate, Task


class Loop:
    """Trains clients one after the other with one network."""

    def __init__(self, task: Task, memory_format: torch.memory_format) -> None:
        self.task, self.memory_format = task, memory_format
        self.network = task.network().to(memory_format=memory_format)

    def train(self, state: dict[str, Tensor], number: int, clients: list[int]) -> dict[str, Tensor]:
        """Trains each client for one local epoch from `state` and returns the sum of their state dicts."""
        total = {name: torch.zeros_like(value) for name, value in state.items()}
        for client in clients:
            self.network.load_state_dict(state)
            optimizer = torch.optim.SGD(self.network.parameters(), lr=self.task.lr)
            for inputs, targets in self.task.batches(number, client):
                scores = self.network(inputs.contiguous(memory_format=self.memory_format))
                loss = nn.functional.cross_entropy(scores, targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for name, value in self.network.state_dict().items():
                total[name] += value
        return total


def work(loop: Loop, state: dict[str, Tensor], total: dict[str, Tensor], line: Connection) -> None:
    """Runs a worker, which trains its share of every round. Models are passed through the shared tensors."""
    torch.set_num_threads(1)
    while True:
        number, clients = line.recv()
        for name, value in loop.train(state, number, clients).items():
            total[name].copy_(value)
        line.send(None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0, help="additional processes that train; 0 trains in this one")
    parser.add_argument("--threads", type=int, help="threads of this process (default: that of torch)")
    parser.add_argument("--channels_last", action="store_true")
    options = parser.parse_args()
    if options.threads or options.workers:
        torch.set_num_threads(
            options.threads or 1
        )  # before the first tensor, because a fork with more threads may hang
    gate = Gate()
    task = Task()
    loop = Loop(task, torch.channels_last if options.channels_last else torch.contiguous_format)
    state = {name: value.clone() for name, value in loop.network.state_dict().items()}
    lines, totals = [], []
    for _ in range(options.workers):
        for value in state.values():
            value.share_memory_()
        own_end, worker_end = multiprocessing.Pipe()
        total = {name: torch.zeros_like(value).share_memory_() for name, value in state.items()}
        context = multiprocessing.get_context("fork")
        context.Process(target=work, args=(loop, state, total, worker_end), daemon=True).start()
        lines.append(own_end)
        totals.append(total)
    gate.ready()
    for number, sampled in enumerate(task.sampled):
        for worker, line in enumerate(lines):
            line.send((number, sampled[worker :: len(lines)]))
        for line in lines:
            line.recv()
        sums = totals if lines else [loop.train(state, number, sampled)]
        for name, value in state.items():
            value.copy_(sum(each[name] for each in sums) / len(sampled))
        gate.end_round(lambda: list(state.values()))


if __name__ == "__main__":
    main()
