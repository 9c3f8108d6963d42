"""The cost of a local run in torch operators, which are counted because seconds depend on the machine."""

from collections import Counter
from functools import partial

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils._python_dispatch import TorchDispatchMode

from lcfl.engines import StackedEngine
from lcfl.models import LeNet5, ResNet9
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import NO_PULLS, Pulls
from tests.helpers.builders import dealt, engine, named_engine

# Operators in addition to those of a plain loop over ready batches. The operators of the loop are counted here, too,
# because they depend on torch's version: 87 a step of LeNet-5 with 2.15. Lower the numbers if you make a run cheaper.
# Raising one makes every run slower.
STEP = {"LeNet-5": -8, "ResNet-9": -32}  # no optimizer, but it gathers inputs and targets, and keeps the loss
# Copies the model into the network and out again, in views of a vector; means of losses; a copy of the weights that
# have their channels innermost. Older versions need one more for each parameter.
RUN = 5.5 if torch.__version__ >= (2, 15) else 6.5  # for each parameter
PULLS = 66  # the two regularisers and their gradients, of 10 parameters, one of which has its channels innermost
COMPILED_STEP = 3  # positions as a tensor, and the inputs and targets at these positions
STACKED_STEP = 123  # the views by which torch.vmap merges the operations of all clients into one


class Operators(TorchDispatchMode):
    """Counts the operators that reach torch's kernels, including views."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class CountedCalls:
    """Wraps the library of kernels and records the name of every function that is read from it."""

    def __init__(self, library):
        self.library, self.names = library, []

    def __getattr__(self, name):
        self.names.append(name)
        return getattr(self.library, name)


def make_network():
    return LeNet5(in_channels=1, image_size=28, padding=2)


NETWORKS = {"LeNet-5": (make_network, (1, 28, 28)), "ResNet-9": (ResNet9, (3, 32, 32))}


def count_of(name):
    make, shape = NETWORKS[name]
    module = FederatedModule(make, partial(torch.optim.SGD, lr=0.01), cluster_weight=0.1, global_weight=0.1)
    data = dealt(torch.zeros(64, *shape), torch.arange(64) % 10, [range(64)])
    ready, start = engine(module, data), module.initial_model(0)
    pulls = Pulls(start, start[: module.layout.num_embedding])

    def counted(steps, pulled=False):
        batches = [torch.arange(2).numpy()] * steps
        with Operators() as operators:
            ready.run_optimizer(start, batches, pulls if pulled else NO_PULLS)
        return operators.counts.total()

    counted(1)  # makes what is only made once, such as the samples on the device
    return counted


def loop_of(name):
    make, shape = NETWORKS[name]
    network, inputs, targets = make(), torch.zeros(2, *shape), torch.arange(2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    with Operators() as operators:
        loss = torch.nn.functional.cross_entropy(network(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return operators.counts.total()


@pytest.fixture(scope="module")
def count():
    """``count(steps)`` is the number of operators of a local run of LeNet-5 with this number of steps."""
    return count_of("LeNet-5")


@pytest.fixture(scope="module")
def loop():
    """The number of operators of a step of LeNet-5 in a plain training loop."""
    return loop_of("LeNet-5")


@pytest.mark.parametrize("name", NETWORKS)
def test_operators_of_a_step_and_of_a_run_without_its_steps(name):
    count, num_parameters = count_of(name), len(list(NETWORKS[name][0]().parameters()))
    step = count(3) - count(2)
    assert 0 < step <= loop_of(name) + STEP[name]
    assert 0 < count(1) - step <= RUN * num_parameters


def test_operators_of_the_pulls_in_a_step(count):
    assert 0 < (count(3, True) - count(2, True)) - (count(3) - count(2)) <= PULLS


def test_operators_of_a_stacked_step_are_those_of_one_client(loop):
    """The number of clients does not matter, because each operation is started once for all clients."""
    module = FederatedModule(make_network, partial(torch.optim.SGD, lr=0.01))
    data, start = dealt(torch.zeros(64, 1, 28, 28), torch.arange(64) % 10, [range(64)]), module.initial_model(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    stacked = StackedEngine(fabric, module, data.samples, data.dataset.spec, 32)

    def counted(clients, steps):
        batches = [torch.arange(32).numpy()] * steps
        with Operators() as operators:
            stacked.run_all([lambda engine: engine.run_optimizer(start, batches)] * clients)
        return operators.counts.total()

    steps = {clients: counted(clients, 3) - counted(clients, 2) for clients in (2, 7)}
    assert 0 < steps[2] == steps[7] <= loop + STACKED_STEP


def test_a_compiled_step_uses_torch_only_for_its_batch_and_calls_the_kernels_once():
    """It gathers inputs and targets, and one call computes the gradient and updates all parameters."""
    module = FederatedModule(make_network, partial(torch.optim.SGD, lr=0.01), cluster_weight=0.1, global_weight=0.1)
    data, start = dealt(torch.zeros(64, 1, 28, 28), torch.arange(64) % 10, [range(64)]), module.initial_model(0)
    compiled = named_engine("compiled", module, data)
    compiled._kernels = calls = CountedCalls(compiled._kernels)
    pulls = Pulls(start, start[: module.layout.num_embedding])

    def counted(steps, pulled):
        calls.names.clear()
        with Operators() as operators:
            compiled.run_optimizer(start, [torch.arange(32).numpy()] * steps, pulls if pulled else NO_PULLS)
        return operators.counts, Counter(calls.names)

    counted(1, False)
    for pulled in (False, True):
        (fewer, few_calls), (more, more_calls) = counted(2, pulled), counted(3, pulled)
        assert 0 < (more - fewer).total() <= COMPILED_STEP, more - fewer
        assert more_calls - few_calls == {"lcfl_step": 1}


def test_later_steps_cost_as_much_as_earlier_ones(count):
    assert count(9) - count(8) == count(3) - count(2)
