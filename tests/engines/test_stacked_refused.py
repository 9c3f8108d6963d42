"""What the stacked engine refuses, because the clients of a stack would not train as they do alone."""

from functools import partial

import pytest
import torch
from torch import nn

from lcfl.data.spec import SampleSpec
from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.stacked import check_stacked
from lcfl.models import SplitNetwork
from lcfl.models.module import FederatedModule
from tests.engines.networks import SHAPE, CountingApart, CountingInPython, Normal, Plain
from tests.helpers.builders import without_gradients


class Deciding(FederatedModule):
    def training_step(self, batch, batch_idx=0):
        loss = super().training_step(batch, batch_idx)
        return loss if loss > 0 else -loss


class OwnOptimizer(FederatedModule):
    def configure_optimizers(self):
        return super().configure_optimizers()


def after(layer):
    """Returns a function that makes a network with this layer first."""
    return lambda: SplitNetwork(nn.Sequential(layer(), nn.Flatten()), nn.Linear(3 * 11 * 9, 4))


class HookedBackward(Plain):
    def __init__(self):
        super().__init__()
        self.embedding.register_full_backward_hook(lambda *args: None)


@pytest.mark.parametrize(
    ("made", "precision", "why"),
    [
        (partial(FederatedModule, after(partial(nn.Dropout, 0.5))), "32-true", "draws random numbers, as dropout does"),
        (
            partial(FederatedModule, after(partial(nn.BatchNorm2d, 3, track_running_stats=False))),
            "32-true",
            "in evaluation",
        ),
        (partial(FederatedModule, Normal), "bf16-mixed", r"torch\.vmap cannot map it"),
        (partial(FederatedModule, Plain), "16-mixed", "a loss scale for every client"),
        (partial(FederatedModule, Plain, torch.optim.LBFGS), "32-true", "the optimizer is LBFGS, not one that"),
        (partial(OwnOptimizer, Plain), "32-true", "OwnOptimizer defines its own configure_optimizers"),
        (partial(FederatedModule, Plain, without_gradients), "32-true", "the optimizer has hooks or a step of its own"),
        (partial(FederatedModule, HookedBackward), "32-true", "the network has hooks for its backward pass"),
        (partial(Deciding, Plain), "32-true", r"torch\.vmap cannot map it over clients \(RuntimeError: .*control"),
    ],
)
def test_refuses_modules_that_stacking_would_change(made, precision, why):
    with pytest.raises(Unsupported, match=why):
        check_stacked(made(), SampleSpec(SHAPE), precision)


@pytest.mark.parametrize("network", [CountingApart, CountingInPython])
def test_refuses_networks_whose_state_clients_would_share(network):
    with pytest.raises(Unsupported, match="its step changes steps, of which all clients would share one"):
        check_stacked(FederatedModule(network), SampleSpec((7,)))
