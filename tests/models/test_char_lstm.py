"""Tests of LEAF's recurrent network: its size, its cut, and the engine that trains it."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from lcfl.data.datasets import Tensors
from lcfl.data.partition import IID
from lcfl.engines.selection import choose_engine
from lcfl.models import CharLSTM, Layout
from lcfl.models.module import FederatedModule
from tests.helpers.builders import blobs, fedavg, fit

SMALL = partial(CharLSTM, 12, 5, 4, 6, 2)


def test_number_of_parameters_and_cut():
    layout = Layout.from_network(CharLSTM())
    head = 80 * 256 + 80
    lstm = 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2)
    assert layout.num_parameters == 80 * 8 + lstm + head == 819_920
    assert layout.num_embedding == layout.num_parameters - head


def test_scores_are_those_after_the_last_character():
    """Compares with the equations of an LSTM, cell by cell."""
    torch.manual_seed(0)
    network = SMALL()
    numbers = torch.randint(0, 12, (3, 7))
    lstm, states = network.embedding.lstm, [(torch.zeros(3, 6), torch.zeros(3, 6)) for _ in range(2)]
    for column in numbers.T:
        below = network.embedding.characters.weight[column]
        for layer, (hidden, cell) in enumerate(states):
            gates = functional.linear(below, getattr(lstm, f"weight_ih_l{layer}"), getattr(lstm, f"bias_ih_l{layer}"))
            gates = gates + hidden @ getattr(lstm, f"weight_hh_l{layer}").T + getattr(lstm, f"bias_hh_l{layer}")
            enter, forget, new, leave = gates.chunk(4, dim=1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            below = leave.sigmoid() * cell.tanh()
            states[layer] = below, cell
    expected = functional.linear(below, network.decision.weight, network.decision.bias)
    assert network(numbers).shape == (3, 5)
    torch.testing.assert_close(network(numbers), expected)


def text_data():
    """Returns texts in which the last character says what comes next."""
    numbers = torch.randint(0, 12, (400, 4), generator=torch.Generator().manual_seed(0))
    return blobs(4, dataset=Tensors((numbers, numbers[:, -1] % 5)), partition=IID(), batch_size=10)


def test_it_learns_under_the_engine_that_auto_takes(tmp_path):
    data = text_data()
    module = FederatedModule(partial(CharLSTM, 12, 5, 4, 16), partial(torch.optim.Adam, lr=0.02))
    for device in ("cpu", "cuda"):
        assert choose_engine("auto", module, data, device, "32-true").name == "sequential"
    watch = fit(module, data, fedavg(epochs=2), tmp_path, rounds=15)
    assert watch.metrics["test/own_split/global/acc"] > 0.9  # of five classes of similar size


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("compiled", "the inputs are torch.int64, not torch.float32"),
        ("stacked", r"torch.vmap cannot map it over clients .*lstm"),
    ],
)
def test_other_engines_say_why_they_do_not_take_it(engine, reason):
    with pytest.raises(ValueError, match=rf"trainer.engine: got {engine}, but {reason}"):
        choose_engine(engine, FederatedModule(SMALL), text_data(), "cpu", "32-true")
