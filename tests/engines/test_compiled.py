"""The compiled engine agrees with the sequential engine, which uses autograd."""

import functools
import platform
import shlex
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lcfl.data.views import View, ViewedSamples
from lcfl.engines import CompiledEngine, SequentialEngine, kernels
from lcfl.methods.local.least_loss import least_loss
from lcfl.methods.local.training import LocalData
from lcfl.models import ResNet9
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import Pulls
from tests.engines.networks import NETWORKS, SHAPE, Inner, Normal, Plain, Scratch
from tests.engines.pairs import data_of, near, with_frozen_values
from tests.helpers.builders import named_engine

SIZES = (1, 7, 16, 17, 32, 33, 70)
SGD = partial(torch.optim.SGD, lr=0.1)
TOLERANCE = {"rtol": 2e-5, "atol": 1e-5}  # autograd alone is off by 4e-6 on some processors


def engines(network, shape, optimizer=None, number=160, **options):
    """Makes both engines on the same data, each with its own module."""
    data = data_of(shape, number)
    optimizer = optimizer or SGD
    made = [with_frozen_values(FederatedModule(network, optimizer, **options)) for _ in range(2)]
    return tuple(named_engine(*each, data) for each in zip(("sequential", "compiled"), made, strict=True))


def batches_of(*sizes):
    draw = np.random.default_rng(0)
    return [draw.integers(0, 100, size) for size in sizes]


def assert_same_gradient(network, shape, size):
    """Checks that both engines compute the same gradient of a batch of this size."""
    sequential, compiled = engines(network, shape)
    assert type(compiled) is CompiledEngine
    model = sequential.module.initial_model(3)
    (batch,) = batches_of(size)
    expected, actual = (engine.gradient(model, batch) for engine in (sequential, compiled))
    scale = float(expected.vector.abs().max())
    torch.testing.assert_close(actual.vector / scale, expected.vector / scale, **TOLERANCE)
    torch.testing.assert_close(actual.loss, expected.loss.to(torch.float32), **TOLERANCE)
    torch.testing.assert_close(actual.buffers, expected.buffers, **TOLERANCE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradient_for_every_layer_and_batch_size(name, size):
    if size == 1 and name in ("normal", "CNN"):
        pytest.skip("batch normalisation of one sample has no variance")
    assert_same_gradient(*NETWORKS[name], size)


ON_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are for x86")


def use_kernels_with(flag, monkeypatch, tmp_path):
    """Builds the kernels with a flag of the compiler, for this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", shlex.join([*kernels.compiler_command(), flag]))
    monkeypatch.setattr(kernels, "load", functools.cache(kernels.load.__wrapped__))


@ON_X86
@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors_give_the_same_gradients(monkeypatch, tmp_path, flag):
    """Processors without AVX-512, or without AVX, have narrower vectors."""
    monkeypatch.setattr(kernels, "FLAGS", ("-O1", *kernels.FLAGS[1:]))  # which is built faster
    use_kernels_with(flag, monkeypatch, tmp_path)
    for name in NETWORKS:
        for size in (7, 33):
            assert_same_gradient(*NETWORKS[name], size)


def test_buffers_that_are_not_persistent_are_not_part_of_the_model():
    pair = engines(Scratch, SHAPE)
    model = pair[0].module.initial_model(3)
    expected, actual = (engine.run_optimizer(model, batches_of(9, 9)) for engine in pair)
    torch.testing.assert_close(actual.model, expected.model, **TOLERANCE)


@pytest.mark.parametrize("name", NETWORKS)
def test_scores_and_loss_in_evaluation(name):
    network, shape = NETWORKS[name]
    sequential, compiled = engines(network, shape)
    model = sequential.module.initial_model(3)
    if sequential.layout.buffers:
        model = sequential.run_optimizer(model, batches_of(9, 9)).model  # changes the running statistics
    indices = np.arange(75)
    inputs, _ = sequential.samples.batch(indices, torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(compiled.scorer(model)(inputs), sequential.scorer(model)(inputs), **TOLERANCE)
    assert compiled.loss(model, indices) == pytest.approx(sequential.loss(model, indices), rel=1e-5)


def test_a_batch_without_samples_is_refused():
    _, compiled = engines(*NETWORKS["tiled"])
    with pytest.raises(ValueError, match="batch without samples"):
        compiled.gradient(compiled.module.initial_model(3), np.array([], dtype=np.int64))


@pytest.mark.parametrize("flag", [None, pytest.param("-mno-avx512f", marks=[pytest.mark.slow, ON_X86])])
@pytest.mark.parametrize("name", ["tiled", "strided", "CNN"])
def test_scores_of_a_sample_do_not_depend_on_its_batch(name, flag, monkeypatch, tmp_path):
    if flag:
        use_kernels_with(flag, monkeypatch, tmp_path)
    network, shape = NETWORKS[name]
    _, compiled = engines(network, shape)
    inputs, _ = compiled.samples.batch(np.arange(40), torch.device("cpu"))
    scorer = compiled.scorer(compiled.module.initial_model(3))
    apart = [scorer(inputs[begin:end]) for begin, end in ((0, 3), (3, 20), (20, 21), (21, 40))]
    torch.testing.assert_close(torch.cat(apart), scorer(inputs), rtol=0, atol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.01},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("pulls", "part"),
    [
        *((pulls, "all") for pulls in ("none", "centre", "embedding", "both", "corrected")),
        ("both", "embedding"),
        ("corrected", "head"),
    ],
)
def test_sgd_run_with_all_settings_and_pulls(settings, pulls, part):
    optimizer = partial(torch.optim.SGD, lr=0.1, **settings)
    both = engines(Plain, SHAPE, optimizer, cluster_weight=0.5, global_weight=0.3)
    model = both[0].module.initial_model(3)
    centre = near(model) if pulls in ("centre", "both", "corrected") else None
    embedding = near(model, 2)[: both[0].layout.num_embedding] if pulls in ("embedding", "both") else None
    correction = near(model, 4)[: both[0].layout.num_parameters] if pulls == "corrected" else None
    targets = Pulls(centre, embedding, correction)
    options = {"rate_scale": 0.5, "part": part}
    expected, actual = (each.run_optimizer(model, batches_of(32, 5, 17), targets, **options) for each in both)
    torch.testing.assert_close(actual.model, expected.model, rtol=1e-4, atol=1e-5)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-5)
    assert not torch.equal(actual.model, model)
    rest = torch.ones(len(model), dtype=torch.bool)
    rest[both[0].layout.range_of(part)] = False
    assert torch.equal(actual.model[rest], model[rest])


@pytest.mark.parametrize("cut", ["embedding.4", ["embedding.1", "embedding.4"], ["embedding.0"]], ids=str)
@pytest.mark.parametrize("part", ["embedding", "head"])
def test_a_part_of_any_network_is_trained(cut, part):
    """The head may lie anywhere, so the gradients of its layers may need those of others."""
    both = engines(Normal, SHAPE, partial(torch.optim.SGD, lr=0.1, momentum=0.9), cut=cut)
    model = both[0].module.initial_model(3)
    expected, actual = (each.run_optimizer(model, batches_of(12, 8), part=part) for each in both)
    torch.testing.assert_close(actual.model, expected.model, rtol=1e-4, atol=1e-5)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-5)


def test_gradients_include_the_pulls():
    both = engines(Plain, SHAPE, cluster_weight=0.5, global_weight=0.3)
    model = both[0].module.initial_model(3)
    layout = both[0].layout
    targets = Pulls(near(model), near(model, 2)[: layout.num_embedding], near(model, 4)[: layout.num_parameters])
    expected, actual = (each.gradient(model, batches_of(10)[0], 0, targets) for each in both)
    torch.testing.assert_close(actual.vector, expected.vector, **TOLERANCE)
    assert float(actual.loss) == pytest.approx(float(expected.loss), rel=1e-5)


@pytest.mark.parametrize("policy", ["average", "keep_server", "local"])
def test_buffers_follow_the_policy(policy):
    both = engines(Normal, SHAPE, buffer_policy=policy)
    model = both[0].module.initial_model(3)
    first = both[0].module.initial_buffers(3)
    for engine in both:
        engine.buffers = None if first is None else first.clone()
    expected, actual = (engine.run_optimizer(model, batches_of(12, 8)) for engine in both)
    torch.testing.assert_close(actual.model, expected.model, rtol=1e-4, atol=1e-5)
    if first is not None:
        for engine in both:
            assert torch.equal(engine.buffers, first) == (policy == "keep_server")
        torch.testing.assert_close(both[1].buffers, both[0].buffers, **TOLERANCE)


def test_arguments_are_not_changed():
    _, engine = engines(Normal, SHAPE, buffer_policy="local", cluster_weight=1.0)
    model, buffers = engine.module.initial_model(3), engine.module.initial_buffers(3)
    copies, centre = (model.clone(), buffers.clone()), near(model)
    engine.buffers = buffers
    engine.run_optimizer(model, batches_of(12, 8), Pulls(centre))
    engine.gradient(model, batches_of(12)[0])
    assert torch.equal(model, copies[0])
    assert torch.equal(buffers, copies[1])
    assert torch.equal(centre, near(model))


def test_bits_do_not_depend_on_what_was_trained_before():
    _, engine = engines(Normal, SHAPE)
    model = engine.module.initial_model(3)
    first = engine.run_optimizer(model, batches_of(12, 33)).model
    engine.run_optimizer(near(model), batches_of(70, 1 + 1))
    engine.scorer(model)(torch.randn(40, *SHAPE))
    assert torch.equal(engine.run_optimizer(model, batches_of(12, 33)).model, first)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_diverged_model_leaves_nothing_behind(name):
    network, shape = NETWORKS[name]
    _, engine = engines(network, shape)
    model, batches = engine.module.initial_model(3), batches_of(7, 20)
    expected = [engine.gradient(model, batch).vector for batch in batches]
    for batch in batches_of(32, 33):
        engine.gradient(torch.full_like(model, torch.nan), batch)
    for batch, vector in zip(batches, expected, strict=True):
        assert torch.equal(engine.gradient(model, batch).vector, vector)


def test_hessian_products_are_those_of_autograd():
    sequential, compiled = engines(Inner, (7,))
    model = sequential.module.initial_model(3)
    direction = near(torch.zeros(len(model)))
    expected, actual = (
        each.hessian_vector_product(model, batches_of(9)[0], direction) for each in (sequential, compiled)
    )
    assert torch.equal(actual.vector, expected.vector)


class Pooled(nn.Module):
    """A network with overlapping windows and no ReLU before them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.pool = nn.MaxPool2d(2, 1)
        self.decision = nn.Linear(2 * 9, 4)

    def forward(self, x):
        return self.decision(torch.flatten(self.pool(self.conv(x)), 1))


def test_ties_within_a_window_go_to_the_first_pixel_as_in_torch():
    sequential, compiled = engines(Pooled, (1, 4, 4))
    for engine in (sequential, compiled):
        engine.samples.inputs.round_()  # makes many pixels equal
    model = sequential.module.initial_model(3)
    expected, actual = (each.gradient(model, batches_of(20)[0]) for each in (sequential, compiled))
    torch.testing.assert_close(actual.vector, expected.vector, **TOLERANCE)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_nan_weight_makes_scores_and_loss_nan_and_never_has_the_least_loss(name):
    network, shape = NETWORKS[name]
    sequential, compiled = engines(network, shape)
    model = sequential.module.initial_model(3)
    broken = model.clone()
    broken[0] = torch.nan
    indices = np.arange(75)
    inputs, _ = sequential.samples.batch(indices, torch.device("cpu"))
    with torch.no_grad():
        expected, actual = (engine.scorer(broken)(inputs).isnan() for engine in (sequential, compiled))
    assert expected.any() and torch.equal(actual, expected)
    assert np.isnan(compiled.loss(broken, indices))
    assert least_loss(torch.stack([broken, model]), LocalData(indices, 10, 0, 0), compiled)[0] == 1


@pytest.mark.parametrize("pixel", range(16))
def test_a_window_with_a_nan_is_nan_whichever_pixel_it_is(pixel):
    sequential, compiled = engines(Pooled, (1, 4, 4))
    model = sequential.module.initial_model(3)
    inputs = torch.randn(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    inputs[::3].view(-1, 16)[:, pixel] = torch.nan
    with torch.no_grad():
        expected, actual = (engine.scorer(model)(inputs) for engine in (sequential, compiled))
    assert int(expected.isnan().all(dim=1).sum()) == 14
    torch.testing.assert_close(actual, expected, equal_nan=True, **TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "error"),
    [(nn.Tanh, 1e-37), (nn.Sigmoid, 1e-37), (partial(nn.LeakyReLU, 0.2), 0), (nn.SiLU, 1e-35), (nn.GELU, 2e-6)],
)
def test_activations_are_those_of_torch_for_numbers_of_all_sizes(kind, error):
    """The linear layer returns its inputs."""
    sequential, compiled = engines(lambda: nn.Sequential(nn.Linear(4, 4), kind()), (4,), cut=None)
    model = torch.cat([torch.eye(4).flatten(), torch.zeros(4)])
    sizes = torch.logspace(-30, 30, 4000)
    inputs = torch.cat([sizes, -sizes, torch.linspace(-100, 100, 4000)]).view(-1, 4)
    with torch.no_grad():
        expected, actual = (engine.scorer(model)(inputs) for engine in (sequential, compiled))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=error)


class Changing(View):
    """A view that changes inputs and labels."""

    def __init__(self, inputs=None, targets=None):
        self._inputs, self._targets = inputs, targets

    def inputs(self, inputs, indices):
        return inputs if self._inputs is None else self._inputs(inputs)

    def targets(self, targets):
        return targets if self._targets is None else self._targets(targets)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (Changing(torch.Tensor.double), r"of shape \(7,\) in torch.float32, but .* returned \(7,\) in torch.float64"),
        (Changing(lambda inputs: inputs[:, 1:]), r"returned \(6,\) in torch.float32; set trainer.engine=sequential"),
        (Changing(targets=torch.Tensor.int), "labels: got torch.int32; they must be torch.int64"),
    ],
)
def test_refuses_batches_that_it_was_not_made_for(view, message):
    _, compiled = engines(Inner, (7,))
    compiled.samples = ViewedSamples(compiled.samples, (view,))
    with pytest.raises(ValueError, match=message):
        compiled.run_optimizer(compiled.module.initial_model(3), batches_of(9))


def test_a_residual_network_of_forty_operations():
    """ResNet-9 on images of 8 x 8 pixels has shortcuts, group normalisation and windows of one pixel."""
    both = engines(partial(ResNet9, 3, 8, 4), (3, 8, 8), number=20)
    model = both[0].module.initial_model(3)
    (batch,) = [np.arange(3)]
    expected, actual = (each.gradient(model, batch) for each in both)
    scale = float(expected.vector.abs().max())
    torch.testing.assert_close(actual.vector / scale, expected.vector / scale, rtol=1e-3, atol=1e-5)


def test_max_steps_cuts_a_run():
    _, engine = engines(Inner, (7,))
    engine.max_steps = 1
    model = engine.module.initial_model(3)
    one = engine.run_optimizer(model, batches_of(4, 4)).model
    engine.max_steps = None
    assert torch.equal(one, engine.run_optimizer(model, batches_of(4)).model)
    assert isinstance(engine, SequentialEngine)
