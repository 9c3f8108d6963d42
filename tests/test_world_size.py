"""The same bits on one rank and on several, also when the parent has computed with two threads."""

import pytest
import torch

from tests.fits import assert_same_run, fit


@pytest.mark.parametrize("method", ["fedprox", "fednova", "fedper", "lg_fedavg", "per_fedavg"])
def test_baselines_have_the_same_bits_on_two_ranks(tmp_path, reference, method):
    one, _ = reference(method)
    assert_same_run(one, fit(tmp_path, method, 2).path)


@pytest.mark.parametrize(
    ("method", "ranks"),
    [
        pytest.param(method, ranks, marks=[pytest.mark.slow] if ranks == 3 and method != "lcfed" else [])
        for method in ("lcfed", "lcfed_plus", "fedac", "fedavg", "local")
        for ranks in (2, 3)
    ],
)
def test_ranks_do_not_change_bits(tmp_path, reference, method, ranks):
    one, _ = reference(method)
    assert_same_run(one, fit(tmp_path, method, ranks).path)


def test_parent_that_computed_with_two_threads(tmp_path, reference):
    one, _ = reference("lcfed")
    torch.set_num_threads(2)
    left = torch.rand(700, 700)
    (left @ left).sum()
    alone, both = (fit(tmp_path / str(ranks), "lcfed", ranks).path for ranks in (1, 2))
    assert torch.get_num_threads() == 2
    assert_same_run(one, alone)
    assert_same_run(one, both)


@pytest.mark.parametrize("method", ["lcfed", "per_fedavg"])
def test_bfloat16_steps_have_the_same_bits_on_two_ranks(tmp_path, method):
    one = fit(tmp_path / "1", method, 1, 2, "--trainer.precision=bf16-mixed").path
    two = fit(tmp_path / "2", method, 2, 2, "--trainer.precision=bf16-mixed").path
    full = fit(tmp_path / "3", method, 1, 2).path
    assert_same_run(one, two)
    with pytest.raises(AssertionError):
        assert_same_run(one, full)
