"""Each process trains a copy of the module, so what a copy would lose or share is refused. A run gives out networks."""

from functools import partial

import pytest
import torch
from torch import nn

from lcfl.federation.federation import Federation
from lcfl.federation.module_checks import check_module
from lcfl.models import MLP
from lcfl.models.module import FederatedModule
from tests.helpers.builders import blobs, blobs_module, fedavg


class Body(nn.Module):
    """A network whose parts may be changed before it is checked."""

    def __init__(self, change=None):
        super().__init__()
        self.body, self.decision = nn.Linear(4, 5), nn.Linear(5, 2)
        if change is not None:
            change(self)

    def forward(self, inputs):
        return self.decision(self.body(inputs).relu())


def by_closure(network):
    network.body_of = lambda inputs: network.body(inputs)


def by_default(network):
    network.body_of = lambda inputs, body=network.body: body(inputs)


def by_hook(network):
    network.body.register_forward_hook(lambda layer, inputs, output: network.decision.zero_grad())


@pytest.mark.parametrize("change", [by_closure, by_default, by_hook])
def test_functions_that_hold_a_part_of_the_module_are_refused(change):
    with pytest.raises(
        ValueError,
        match=r"^model: (network\.body_of|a hook of network\.body) is a function that holds the module .* Use a method",
    ):
        check_module(FederatedModule(partial(Body, change)))


def test_a_function_in_the_module_itself_that_holds_it_is_refused():
    class Penalised(FederatedModule):
        def __init__(self, network):
            super().__init__(network)
            self.penalty = lambda: sum(each.square().sum() for each in self.network.parameters())

    with pytest.raises(ValueError, match=r"^model: penalty is a function that holds the module"):
        check_module(Penalised(Body))


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused(hook):
    def change(network):
        getattr(network.decision.weight, hook)(lambda slope: None)

    with pytest.raises(ValueError, match=r"^model: the parameter network\.decision\.weight has a hook, which a copy"):
        check_module(FederatedModule(partial(Body, change)))


def test_factories_may_read_settings_of_the_module():
    class Rated(FederatedModule):
        def __init__(self):
            self.rate = 0.1
            super().__init__(Body, lambda parameters: torch.optim.SGD(parameters, lr=self.rate))

    check_module(Rated())


def test_functions_and_hooks_that_hold_nothing_of_the_module_are_kept():
    scale = 2.0

    def change(network):
        network.activation = lambda values: scale * values.relu()
        network.body.register_full_backward_hook(lambda layer, into, out: None)

    check_module(FederatedModule(partial(Body, change)))


class Turned(FederatedModule):
    """A module whose outputs are not those of its network."""

    def forward(self, inputs):
        return self.network(-inputs)


class Flattened(FederatedModule):
    """A module whose network does not take the inputs."""

    def forward(self, inputs):
        return self.network(inputs[:, :8])


class Passed(FederatedModule):
    """A module that calls its network, as many a LightningModule does."""

    def forward(self, inputs):
        return self.network(inputs)


def test_a_forward_of_ones_own_must_be_that_of_the_network(tmp_path):
    """Predictions, exports and the models of a run would be those of the network alone."""
    network = blobs_module().make_network
    federation = Federation(1, logger=False, enable_progress_bar=False, default_root_dir=tmp_path, devices=1)
    for kind, made in ((Turned, network), (Flattened, partial(MLP, 8, [], 8))):
        words = rf"^model: {kind.__name__}.forward does not return what its network does. .* Put what"
        with pytest.raises(ValueError, match=words):
            federation.fit(kind(made), blobs(5), fedavg())
    federation.fit(Passed(network), blobs(5), fedavg())


def test_a_step_may_leave_out_the_number_of_the_batch(tmp_path):
    class Short(FederatedModule):
        def training_step(self, batch):
            return super().training_step(batch)

    network = blobs_module().make_network
    options = {"logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path, "engine": "sequential"}
    runs = [
        Federation(2, devices=1, **options).fit(kind(network), blobs(5), fedavg()) for kind in (Short, FederatedModule)
    ]
    assert torch.equal(*(run.state.global_model for run in runs))
