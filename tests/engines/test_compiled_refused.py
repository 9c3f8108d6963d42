"""The modules that the compiled engine accepts, and its reasons to refuse others."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from lcfl.data.spec import SampleSpec
from lcfl.engines import compiled
from lcfl.engines.compiled import check_compiled
from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.tracing import trace
from lcfl.models.module import FederatedModule
from tests.engines.networks import SHAPE, Plain, Plainly


def module(network=Plain, optimizer=None, kind=FederatedModule, **options):
    return kind(network, optimizer or partial(torch.optim.SGD, lr=0.1), **options)


def check(made, dtype=torch.float32, **options):
    check_compiled(made, SampleSpec(SHAPE, dtype, 10), **options)


class OwnStep(FederatedModule):
    def training_step(self, batch, batch_idx=0):
        return super().training_step(batch, batch_idx)


def patched():
    made = module()
    made.regularizer = lambda: 0.0
    return made


def hooked_loss():
    made = module()
    made.loss.register_forward_hook(lambda loss, inputs, value: 3 * value)
    return made


def patched_loss():
    made = module()
    made.loss.forward = lambda scores, targets: 3 * nn.functional.cross_entropy(scores, targets)
    return made


def hooked_module():
    made = module()
    made.register_forward_hook(lambda module, inputs, scores: 3 * scores)
    return made


def two_rates(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.2}])


@pytest.mark.parametrize(
    ("made", "options", "why"),
    [
        (partial(module), {"precision": "16-mixed"}, "not in 16-mixed on cpu"),
        (partial(module), {"device": "cuda"}, "not in 32-true on cuda"),
        (partial(module), {"dtype": torch.int64}, "inputs are torch.int64"),
        (partial(module, kind=OwnStep), {}, "OwnStep defines its own training_step"),
        (partial(module, loss=nn.CrossEntropyLoss(reduction="sum")), {}, "the loss is a sum"),
        (partial(module, loss=nn.CrossEntropyLoss(ignore_index=0)), {}, "the loss ignores label 0"),
        (partial(module, loss=nn.MultiMarginLoss()), {}, "MultiMarginLoss"),
        (patched, {}, "FederatedModule defines its own regularizer"),
        (hooked_loss, {}, "the loss has hooks"),
        (patched_loss, {}, "another forward"),
        (hooked_module, {}, "FederatedModule has hooks"),
        (partial(module, optimizer=torch.optim.Adagrad), {}, "the optimizer is Adagrad"),
        (partial(module, optimizer=two_rates), {}, "the same plain settings for all parameters"),
        (
            partial(module, optimizer=partial(torch.optim.SGD, lr=0.1, maximize=True)),
            {},
            "the optimizer is SGD, not .* that minimizes",
        ),
    ],
)
def test_refuses_modules_whose_step_it_would_replace(made, options, why):
    with pytest.raises(Unsupported, match=why):
        check(made(), **options)


class InEvaluation(FederatedModule):
    """Keeps its normalisations in evaluation mode, as is usual in Lightning."""

    def train(self, mode=True):
        super().train(mode)
        self.network.embedding.eval()
        return self


class OwnChoice(FederatedModule):
    def trained_parameters(self):
        return super().trained_parameters()[:1]


@pytest.mark.parametrize(("kind", "name"), [(InEvaluation, "train"), (OwnChoice, "trained_parameters")])
def test_refuses_other_modes_and_parameters(kind, name):
    with pytest.raises(Unsupported, match=f"{kind.__name__} defines its own {name}$"):
        check(module(kind=kind))


@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_refuses_an_optimizer_with_hooks(hook):
    def hooked(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        getattr(optimizer, hook)(lambda *args: None)
        return optimizer

    with pytest.raises(Unsupported, match="without hooks"):
        check(module(optimizer=hooked))


class Doubled(Plainly):
    def forward(self, x):
        return 2 * super().forward(x)


class Quiet(Plainly):
    """Small scores, twice as large as a trace of `Plainly` gives them, as a log softmax."""

    def __init__(self):
        super().__init__()
        self.decision.weight.data.mul_(1e-3)
        self.decision.bias.data.zero_()

    def forward(self, x):
        return nn.functional.log_softmax(2 * super().forward(x), dim=1)


class Doubles(Plainly):
    def forward(self, x):
        return super().forward(x).double()


class Wider(Plainly):
    def __init__(self):
        super().__init__()
        self.decision = nn.Linear(3 * 11 * 9, 5)


class Narrower(Plainly):
    def __init__(self):
        super().__init__()
        self.decision = nn.Linear(3 * 11 * 9 - 1, 4)


@pytest.mark.parametrize(
    ("network", "why"),
    [
        (Doubled, "its outputs are not those of its trace"),
        (Wider, r"returns \[2, 5\] in torch.float32 for two samples, and its trace 4 each"),
        (Doubles, r"returns \[2, 4\] in torch.float64"),
        (Narrower, "cannot take two random inputs"),
    ],
)
def test_refuses_a_network_that_its_trace_does_not_show(monkeypatch, network, why):
    monkeypatch.setattr(compiled, "trace", lambda network, *others: trace(Plainly(), SHAPE))
    with pytest.raises(Unsupported, match=why):
        check(module(network))


def test_a_log_softmax_does_not_hide_other_scores(monkeypatch):
    ended = replace(trace(Plainly(), SHAPE), log_softmax=True)
    monkeypatch.setattr(compiled, "trace", lambda *arguments: ended)
    with pytest.raises(Unsupported, match="its outputs are not those of its trace"):
        check(module(Quiet))


class ChangesItsInput(Plainly):
    def forward(self, x):
        return super().forward(nn.functional.leaky_relu(x, 0.1, inplace=True))


class Broken(Plainly):
    def __init__(self):
        super().__init__()
        self.decision.bias.data.fill_(torch.nan)


@pytest.mark.parametrize("network", [ChangesItsInput, Broken])
def test_accepts_networks_that_change_their_input_or_return_nan(network):
    check(module(network))


def test_accepts_plain_networks_also_while_gradients_are_off():
    with torch.no_grad(), torch.autocast("cpu"):
        check(module())
    check(module(Plainly))
