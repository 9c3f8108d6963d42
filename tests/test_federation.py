"""Settings that a federation refuses as soon as it is made, and what it says."""

import pytest
import torch

from lcfl import Federation


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": -1}, "trainer: got rounds=-1, evaluate_every=10; neither may be negative"),
        ({"evaluate_every": -1}, "trainer: got rounds=100, evaluate_every=-1; neither"),
        ({"strategy": "fsdp"}, "trainer.strategy: got 'fsdp'; .* a client's model fits on one device"),
        ({"precision": "64-true"}, "trainer.precision: got '64-true'; allowed are 32-true, .* merged in float32"),
        ({"precision": "16-mixed", "accelerator": "cpu"}, "trainer.precision: got 16-mixed on a CPU, .*bf16-mixed"),
        ({"accelerator": "tpu"}, "trainer.accelerator: got 'tpu'; allowed are auto, cpu, cuda and gpu"),
        ({"name": "a/b"}, "trainer.name: got 'a/b'; it must be the name of one folder"),
        ({"name": ".."}, "trainer.name: got '..'"),
    ],
)
def test_a_setting_that_is_not_allowed_is_named_with_what_is(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Federation(**settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("accelerator", ["cuda", "gpu"])
def test_a_gpu_that_is_not_there(accelerator):
    with pytest.raises(ValueError, match=rf"trainer.accelerator: got {accelerator}, but torch finds no GPU here"):
        Federation(accelerator=accelerator)
