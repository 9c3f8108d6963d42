"""The losses and optimizers of the compiled engine agree with torch's."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lcfl.data.datasets import Tensors
from lcfl.data.partition import IID
from lcfl.data.spec import SampleSpec
from lcfl.data.views import View, ViewedSamples
from lcfl.engines.compiled import check_compiled
from lcfl.engines.forward_graph import Unsupported
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import Pulls
from tests.engines.networks import SHAPE, Inner, Plain
from tests.engines.pairs import data_of, near
from tests.engines.test_compiled import SIZES, batches_of, engines
from tests.helpers.builders import blobs, loaded, named_engine

TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.5])


def numbers(shape, wide=1.0, binary=False):
    """Returns random inputs of this shape with four numbers each, or with four labels that are 0 or 1."""
    draw = torch.Generator().manual_seed(0)
    inputs, targets = wide * torch.randn(160, *shape, generator=draw), torch.randn(160, 4, generator=draw)
    targets = (targets > 0).float() if binary else targets
    return loaded(blobs(2, dataset=Tensors((inputs, targets)), partition=IID(), protocols=["own_split"]))


def pair(loss, data, network=Plain, optimizer=None, **options):
    """Makes a sequential and a compiled engine on the same data, each with its own module."""
    optimizer = optimizer or partial(torch.optim.SGD, lr=0.1)
    options = {"loss": loss, "report": "loss", **options}
    return [
        named_engine(name, FederatedModule(network, optimizer, **options), data) for name in ("sequential", "compiled")
    ]


LOSSES = {
    "class weights": (nn.CrossEntropyLoss(WEIGHTS), data_of),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), data_of),
    "class weights and label smoothing": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.3), data_of),
    "squared error": (nn.MSELoss(), numbers),
    "absolute error": (nn.L1Loss(), numbers),
    "Huber": (nn.HuberLoss(delta=0.4), numbers),
    "smooth L1": (nn.SmoothL1Loss(beta=1.3), numbers),
    "smooth L1 without a threshold": (nn.SmoothL1Loss(beta=0.0), numbers),
    "binary cross-entropy": (nn.BCEWithLogitsLoss(), partial(numbers, binary=True)),
    "binary cross-entropy of probabilities": (nn.BCEWithLogitsLoss(), lambda shape: numbers(shape)),
    "positive weights": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), partial(numbers, binary=True)),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_of_every_loss(name, size):
    loss, data = LOSSES[name]
    both = pair(loss, data(SHAPE))
    model, (batch,) = both[0].module.initial_model(3), batches_of(size)
    expected, actual = (engine.gradient(model, batch) for engine in both)
    scale = float(expected.vector.abs().max())
    torch.testing.assert_close(actual.vector / scale, expected.vector / scale, **TOLERANCE)
    assert float(actual.loss) == pytest.approx(float(expected.loss), rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_a_run_and_of_an_evaluation(name):
    loss, data = LOSSES[name]
    both = pair(loss, data((7,)), Inner)
    model = both[0].module.initial_model(3)
    expected, actual = (engine.run_optimizer(model, batches_of(32, 5, 17)) for engine in both)
    torch.testing.assert_close(actual.model, expected.model, **TOLERANCE)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-5)
    losses = [engine.loss(actual.model, np.arange(75)) for engine in both]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("ended", [nn.LogSoftmax(1), nn.LogSoftmax(-1)])
@pytest.mark.parametrize(
    "loss",
    [nn.NLLLoss(), nn.NLLLoss(WEIGHTS), nn.CrossEntropyLoss(WEIGHTS), nn.CrossEntropyLoss(label_smoothing=0.3)],
)
def test_a_log_softmax_at_the_end(loss, ended):
    layers = nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 4), ended
    both = pair(loss, data_of((7,)), lambda: nn.Sequential(*copy.deepcopy(layers)), cut=None)
    model, (batch,) = both[0].module.initial_model(3), batches_of(17)
    expected, actual = (engine.gradient(model, batch) for engine in both)
    torch.testing.assert_close(actual.vector, expected.vector, **TOLERANCE)
    expected, actual = (engine.run_optimizer(model, batches_of(32, 5, 17)) for engine in both)
    torch.testing.assert_close(actual.model, expected.model, **TOLERANCE)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-5)
    inputs = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    scores = [engine.scorer(model)(inputs) for engine in both]
    torch.testing.assert_close(*scores, **TOLERANCE)
    losses = [engine.loss(actual.model, np.arange(75)) for engine in both]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_binary_cross_entropy_of_large_scores_is_finite(weights):
    both = pair(
        nn.BCEWithLogitsLoss(pos_weight=weights),
        numbers((7,), wide=1e4, binary=True),
        partial(nn.Linear, 7, 4),
        cut=None,
    )
    model, (batch,) = both[0].module.initial_model(3), batches_of(40)
    expected, actual = (engine.gradient(model, batch) for engine in both)
    assert float(expected.loss) > 100
    scale = float(expected.vector.abs().max())
    torch.testing.assert_close(actual.vector / scale, expected.vector / scale, **TOLERANCE)
    assert float(actual.loss) == pytest.approx(float(expected.loss), rel=1e-5)


def test_a_negative_loss_is_a_loss():
    """Targets beyond 1 make the binary cross-entropy negative, here -1."""
    targets = torch.full((160, 1), 1 + 1 / 128)
    data = loaded(blobs(2, dataset=Tensors((torch.full((160, 1), 128.0), targets)), partition=IID()))
    for engine in pair(nn.BCEWithLogitsLoss(), data, partial(nn.Linear, 1, 1), cut=None):
        assert float(engine.gradient(torch.tensor([1.0, 0.0]), np.arange(5)).loss) == -1


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_model_with_a_nan_is_nan(name):
    loss, data = LOSSES[name]
    _, compiled = pair(loss, data((7,)), Inner)
    model = compiled.module.initial_model(3)
    model[-1] = torch.nan  # the bias of the last output
    assert compiled.gradient(model, batches_of(20)[0]).loss.isnan()


def test_a_batch_whose_labels_all_weigh_nothing_has_no_loss_as_in_torch():
    both = pair(nn.CrossEntropyLoss(WEIGHTS), data_of((7,)), Inner)
    _, labels = both[0].samples.batch(np.arange(100), torch.device("cpu"))
    batch = np.flatnonzero(labels == 2)[:9]
    for engine in both:
        assert engine.gradient(engine.module.initial_model(3), batch).loss.isnan()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"betas": (0.5, 0.9), "weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "fused": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.0, 0.99)}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("pulls", "part"),
    [("none", "all"), ("both", "all"), ("corrected", "all"), ("both", "embedding"), ("corrected", "head")],
)
def test_adam_run_with_all_settings_and_pulls(kind, settings, pulls, part):
    # A larger eps, because the step of a parameter whose gradient is about 0 depends on the last bits of the gradient.
    optimizer = partial(kind, lr=0.02, eps=1e-3, **settings)
    both = engines(Plain, SHAPE, optimizer, cluster_weight=0.5, global_weight=0.3)
    model = both[0].module.initial_model(3)
    layout = both[0].layout
    targets = Pulls(
        None if pulls == "none" else near(model),
        near(model, 2)[: layout.num_embedding] if pulls == "both" else None,
        near(model, 4)[: layout.num_parameters] if pulls == "corrected" else None,
    )
    options = {"rate_scale": 0.5, "part": part}
    expected, actual = (each.run_optimizer(model, batches_of(32, 5, 17, 17), targets, **options) for each in both)
    torch.testing.assert_close(actual.model, expected.model, rtol=1e-4, atol=1e-5)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-5)
    assert not torch.equal(actual.model, model)
    rest = torch.ones(len(model), dtype=torch.bool)
    rest[layout.range_of(part)] = False
    assert torch.equal(actual.model[rest], model[rest])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_many_steps_of_adam_as_it_is_in_torch(kind):
    """No gradient of this network is about 0, so the small eps of torch's default changes nothing."""
    both = pair(nn.MSELoss(), numbers((7,)), partial(nn.Linear, 7, 4), kind, cut=None)
    model = both[0].module.initial_model(3)
    expected, actual = (engine.run_optimizer(model, batches_of(*[20] * 100)) for engine in both)
    torch.testing.assert_close(actual.model, expected.model, rtol=1e-4, atol=1e-5)
    assert float((actual.model - model).abs().max()) > 0.03


def test_moments_are_those_of_one_local_run():
    _, engine = engines(Plain, SHAPE, partial(torch.optim.Adam, lr=0.01))
    model = engine.module.initial_model(3)
    first = engine.run_optimizer(model, batches_of(12, 33)).model
    engine.run_optimizer(near(model), batches_of(70))
    assert torch.equal(engine.run_optimizer(model, batches_of(12, 33)).model, first)


class Spoilt(View):
    """A view that changes targets."""

    def __init__(self, change):
        self._change = change

    def targets(self, targets):
        return self._change(targets)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (torch.Tensor.double, "numbers: got torch.float64; they must be torch.float32"),
        (lambda targets: targets[:, :3], r"numbers: got shape \[9, 3\] for 9 samples; \[9, 4\] is needed"),
    ],
)
def test_refuses_targets_that_it_was_not_made_for(change, message):
    _, compiled = pair(nn.MSELoss(), numbers((7,)), Inner)
    compiled.samples = ViewedSamples(compiled.samples, (Spoilt(change),))
    with pytest.raises(ValueError, match=message):
        compiled.run_optimizer(compiled.module.initial_model(3), batches_of(9))


NUMBERS = {"num_classes": None, "target_shape": (4,), "target_dtype": torch.float32}


@pytest.mark.parametrize(
    ("loss", "optimizer", "spec", "why"),
    [
        (nn.CrossEntropyLoss(), None, NUMBERS, "the targets are not classes"),
        (nn.MSELoss(), None, {}, "the targets are not numbers in float32"),
        (nn.BCEWithLogitsLoss(), None, NUMBERS | {"target_dtype": torch.int64}, "not numbers in float32"),
        (nn.MSELoss(), None, NUMBERS | {"target_shape": ()}, r"a target has the shape \(\), and an output \(4,\)"),
        (nn.MSELoss(), None, NUMBERS | {"target_shape": (1,)}, r"a target has the shape \(1,\)"),
        (nn.MSELoss(reduction="sum"), None, NUMBERS, "the loss is a sum"),
        (
            nn.SoftMarginLoss(),
            None,
            NUMBERS,
            r"the loss is SoftMarginLoss\(\), not CrossEntropyLoss, NLLLoss, MSELoss, BCE",
        ),
        (nn.HuberLoss(delta=0), None, NUMBERS, "threshold of HuberLoss.* is not a number of at least"),
        (nn.SmoothL1Loss(beta=-1.0), None, NUMBERS, "is not a number of at least"),
        (nn.SmoothL1Loss(beta=1e-40), None, NUMBERS, "is not a number of at least"),
        (nn.SmoothL1Loss(beta="1"), None, NUMBERS, "is not a number of at least"),
        (nn.NLLLoss(), None, {}, r"the loss is NLLLoss\(\), and its network does not end with a log softmax"),
        (nn.NLLLoss(ignore_index=2), None, {}, "the loss ignores label 2"),
        (nn.BCEWithLogitsLoss(torch.ones(4)), None, NUMBERS, "other weights than those of positive targets"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)), None, NUMBERS, r"weights of shape \(1,\) .* for 4 outputs"),
        (nn.CrossEntropyLoss(torch.ones(5)), None, {}, r"weights of shape \(5,\) in torch.float32 for 4 outputs"),
        (nn.CrossEntropyLoss(torch.ones(4).double()), None, {}, "in torch.float64 for 4 outputs"),
        (nn.CrossEntropyLoss(torch.arange(8.0)[::2]), None, {}, "the weights of the loss are a view"),
        (
            nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]).expand(4)),
            None,
            NUMBERS,
            "the weights of the loss are a view",
        ),
        (nn.CrossEntropyLoss(nn.Parameter(torch.ones(4))), None, {}, "or require a gradient"),
        (nn.CrossEntropyLoss(label_smoothing=1.5), None, {}, "the label smoothing is 1.5"),
        (nn.CrossEntropyLoss(label_smoothing=-0.5), None, {}, "the label smoothing is -0.5"),
        (nn.CrossEntropyLoss(), partial(torch.optim.Adam, amsgrad=True), {}, "the optimizer is Adam, not .* amsgrad"),
        (nn.CrossEntropyLoss(), partial(torch.optim.AdamW, maximize=True), {}, "AdamW that minimizes"),
        (nn.CrossEntropyLoss(), torch.optim.RMSprop, {}, "the optimizer is RMSprop"),
    ],
)
def test_refuses_losses_and_optimizers_that_it_does_not_know(loss, optimizer, spec, why):
    made = FederatedModule(Plain, optimizer or partial(torch.optim.SGD, lr=0.1), loss=loss, report="loss")
    with pytest.raises(Unsupported, match=why):
        check_compiled(made, SampleSpec(SHAPE, **{"num_classes": 4} | spec))
