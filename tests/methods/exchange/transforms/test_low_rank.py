"""Tests of low-rank compression: ranks by hand, bytes by the formula, and what the server restores."""

import numpy as np
import pytest
import torch

from lcfl.core.messages import Uplink, all_finite
from lcfl.methods.exchange.transforms import LowRankCompression
from lcfl.methods.exchange.transforms.low_rank import factors, product
from lcfl.models import Layout, LeNet5
from tests.helpers.builders import Normed, linear

DRAW = np.random.default_rng(0)


@pytest.mark.parametrize(("energy", "rank"), [(0.5, 1), (9 / 14, 1), (0.65, 2), (13 / 14, 2), (0.95, 3), (1.0, 3)])
def test_the_rank_is_the_smallest_that_keeps_the_energy(energy, rank):
    small = factors(torch.diag(torch.tensor([3.0, 2.0, 1.0])), energy - 1e-9)  # the energies are 9, 4 and 1 of 14
    assert small.shape == (rank, 7) and small[:, 0].tolist() == pytest.approx([3.0, 2.0, 1.0][:rank])


def test_the_product_of_the_factors_is_the_matrix():
    draw = torch.Generator().manual_seed(0)
    low = torch.randn(6, 2, generator=draw) @ torch.randn(2, 9, generator=draw)
    small = factors(low, 1 - 1e-9)
    assert small.shape == (2, 16)
    torch.testing.assert_close(product(small, 6), low)
    assert factors(torch.zeros(4, 5), 0.95).shape == (0, 10)
    assert torch.equal(product(torch.zeros(0, 10), 4), torch.zeros(4, 5))


def rank_one(layout):
    """Returns an update whose matrices all have rank 1."""
    parts = []
    for _, shape in layout.parameters:
        rows = torch.linspace(1, 2, shape[0])
        parts.append((rows[:, None] * torch.linspace(-1, 1, shape[1:].numel())).reshape(-1) if len(shape) > 1 else rows)
    return torch.cat(parts)


def test_bytes_are_rank_times_rows_plus_columns_plus_one():
    layout = Layout.from_network(LeNet5())
    payload = LowRankCompression().encode({"update": rank_one(layout)}, layout, DRAW)
    matrices = [(6, 75), (16, 150), (120, 400), (84, 120), (10, 84)]
    vectors = 6 + 16 + 120 + 84 + 10
    assert Uplink(0, payload, 1).num_bytes == 4 * (sum(rows + cols + 1 for rows, cols in matrices) + vectors)
    back = LowRankCompression().decode(payload, layout)
    torch.testing.assert_close(back["update"], rank_one(layout))


def test_a_matrix_that_would_not_get_smaller_is_sent_unchanged():
    layout = Layout.from_network(linear())
    update = torch.arange(1.0, 18.0)
    payload = LowRankCompression(1.0).encode({"model": update}, layout, DRAW)
    assert {name: part.numel() for name, part in payload.items()} == {
        "model": 5,
        "model/embedding.weight": 6,  # 3 x 2: rank 2 would take 12 floats
        "model/decision.weight": 6,
    }
    assert torch.equal(LowRankCompression().decode(payload, layout)["model"], update)


def test_buffers_and_parts_of_a_model_are_restored():
    layout = Layout.from_network(Normed())
    for length in (layout.size, layout.num_embedding):
        update = torch.arange(float(length))
        payload = LowRankCompression(1.0).encode({"embedding": update}, layout, DRAW)
        torch.testing.assert_close(LowRankCompression().decode(payload, layout)["embedding"], update)


def test_an_update_that_is_not_finite_stays_so():
    layout = Layout.from_network(linear())
    update = torch.full((17,), float("nan"))
    assert not all(map(all_finite, LowRankCompression().encode({"model": update}, layout, DRAW).values()))


def test_the_error_is_what_the_energy_leaves_out():
    layout = Layout.from_network(LeNet5())
    update = torch.randn(layout.size, generator=torch.Generator().manual_seed(1))
    payload = LowRankCompression(0.9).encode({"update": update}, layout, DRAW)
    lost = (LowRankCompression().decode(payload, layout)["update"] - update).square().sum() / update.square().sum()
    assert 0 < lost <= 0.1 and Uplink(0, payload, 1).num_bytes < 4 * layout.size


@pytest.mark.parametrize("energy", [0.0, 1.1])
def test_an_energy_outside_its_range_is_refused(energy):
    with pytest.raises(ValueError, match=rf"energy={energy}; it must lie in \(0, 1\]"):
        LowRankCompression(energy)
