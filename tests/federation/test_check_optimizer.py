"""The optimizer is checked before a run begins."""

from functools import partial

import pytest
import torch
from torch import nn

from lcfl.federation.checks import check_method
from lcfl.federation.module_checks import check_optimizer
from lcfl.methods.aggregation import GlobalMean
from lcfl.methods.exchange import FullModel
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from lcfl.models import MLP
from lcfl.models.module import FederatedModule
from tests.helpers.builders import blobs, fedavg, fit, linear


def test_anything_but_one_optimizer_is_refused():
    class Scheduled(FederatedModule):
        def configure_optimizers(self):
            return {"optimizer": torch.optim.SGD(self.network.parameters(), lr=0.1)}

    with pytest.raises(ValueError, match=r"Scheduled.configure_optimizers: got dict; a local run needs one torch.opt"):
        check_method(fedavg(), Scheduled(linear), 5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", [{"lr": float("nan")}, {"lr": 0.1, "momentum": float("inf")}])
def test_optimizer_settings_that_are_not_finite_are_refused(options):
    module = FederatedModule(partial(MLP, 16, [4], 8), partial(torch.optim.SGD, **options))
    with pytest.raises(
        ValueError, match=r"model\.optimizer: SGD got (lr=nan|momentum=inf); it must be a finite number"
    ):
        check_method(fedavg(), module, 4)


class Stepping(torch.optim.Optimizer):
    """An optimizer whose learning rate has another name."""

    def __init__(self, parameters, eta=0.1):
        super().__init__(parameters, {"eta": eta})

    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each.data -= group["eta"] * each.grad


class Warming(LocalTraining):
    """A local update with a schedule of its own."""

    def lr_factor(self, data):
        return 0.5


@pytest.mark.parametrize("update", [LocalTraining(1, lr_decay=0.9), Warming(1)])
def test_a_rate_that_changes_needs_the_name_lr(update):
    module = FederatedModule(linear, Stepping)
    check_method(fedavg(), module, 5)
    with pytest.raises(ValueError, match=r"lr_decay and lr_factor multiply lr, which Stepping has not. Call its"):
        check_method(Method(update, FullModel(), GlobalMean()), module, 5)


def test_a_tensor_as_learning_rate_is_refused():
    module = FederatedModule(partial(MLP, 16, [4], 8), partial(torch.optim.SGD, lr=torch.tensor([0.5])))
    with pytest.raises(ValueError, match=r"model\.optimizer: SGD got a tensor as lr, \[0\.5\]; give one number"):
        check_method(fedavg(), module, 4)


def test_a_list_in_place_of_a_number_is_refused():
    # A list as it comes from a file: the parser makes a tensor of it.
    module = FederatedModule(partial(MLP, 16, [4], 8), partial(torch.optim.Adam, betas=(torch.tensor([]), 0.9)))
    with pytest.raises(ValueError, match=r"^model\.optimizer: Boolean value of Tensor with no values is ambiguous"):
        check_method(fedavg(), module, 4)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (
            partial(torch.optim.SGD, lr=0.1, differentiable=True),
            r"SGD cannot take a step on a CPU \(RuntimeError: a leaf",
        ),
        (
            partial(torch.optim.Adam, capturable=True),
            r"Adam cannot take a step on a CPU \(AssertionError: If capturable",
        ),
        (torch.optim.LBFGS, r"LBFGS cannot take a step on a CPU \(TypeError: .*closure"),
    ],
)
def test_optimizers_that_cannot_take_a_step_are_refused(tmp_path, optimizer, says):
    module = FederatedModule(partial(MLP, 16), optimizer)
    before = module.layout.pack(module.network)
    with pytest.raises(ValueError, match=rf"^model\.optimizer: {says}"):
        fit(module, blobs(), fedavg(), tmp_path)
    assert not any(tmp_path.iterdir()) and torch.equal(module.layout.pack(module.network), before)


class Normalised(nn.Sequential):
    """A network that cannot be copied with `copy.deepcopy` before its first forward pass."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.utils.weight_norm(nn.Linear(16, 4))
        self.decision = nn.Linear(4, 8)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_the_step_that_is_tried_leaves_no_trace():
    module = FederatedModule(Normalised, partial(torch.optim.SGD, lr=0.1, weight_decay=0.5))
    before, state = module.layout.pack(module.network), torch.get_rng_state()
    check_optimizer(module)
    assert torch.equal(module.layout.pack(module.network), before) and torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in module.network.parameters())
