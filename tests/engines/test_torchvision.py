"""The compiled engine trains networks of torchvision as the sequential engine does."""

from functools import partial

import numpy as np
import pytest
import torch
from torchvision import models

from lcfl.engines import CompiledEngine
from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.tracing import trace
from lcfl.models.module import FederatedModule
from tests.engines.test_compiled import batches_of, engines


@pytest.mark.parametrize(
    ("make", "options", "error"),
    [
        (models.mobilenet_v2, {"dropout": 0.0}, 0.1),  # channels of a single pixel and nearly equal samples
        (models.mobilenet_v3_small, {"dropout": 0.0}, 1e-3),
        (models.mnasnet0_5, {"dropout": 0.0}, 0.1),
        (models.squeezenet1_1, {"dropout": 0.0}, 1e-2),
        (models.shufflenet_v2_x0_5, {}, 1e-2),
        pytest.param(
            models.efficientnet_b0, {"dropout": 0.0, "stochastic_depth_prob": 0.0}, 0.1, marks=pytest.mark.slow
        ),
        pytest.param(models.regnet_y_400mf, {}, 0.1, marks=pytest.mark.slow),
        pytest.param(models.resnext50_32x4d, {}, 0.1, marks=pytest.mark.slow),
        pytest.param(models.convnext_tiny, {"stochastic_depth_prob": 0.0}, 1e-2, marks=pytest.mark.slow),
        pytest.param(models.densenet121, {}, 0.1, marks=pytest.mark.slow),
    ],
)
def test_scores_and_gradient(make, options, error):
    """A gradient through many normalisations is far from exact in float32, so only its size is compared closely."""
    sequential, compiled = engines(partial(make, num_classes=4, **options), (3, 40, 40), number=100, cut=None)
    assert type(compiled) is CompiledEngine
    model, (batch,) = sequential.module.initial_model(3), batches_of(12)
    expected, actual = (engine.gradient(model, batch) for engine in (sequential, compiled))
    apart, size = (each.norm() for each in (actual.vector - expected.vector, expected.vector))
    assert apart < error * size
    torch.testing.assert_close(actual.loss, expected.loss.to(torch.float32), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.buffers, expected.buffers, rtol=1e-4, atol=1e-4)
    inputs, _ = sequential.samples.batch(np.arange(9), torch.device("cpu"))
    expected, actual = (engine.scorer(model)(inputs) for engine in (sequential, compiled))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.filterwarnings("ignore:The default weight initialization of GoogleNet")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (models.swin_t, "differs between training and evaluation"),
        (models.vit_b_32, "calls eq"),
        (models.googlenet, "differs between training and evaluation"),
    ],
)
def test_refuses_other_networks(make, why):
    with pytest.raises(Unsupported, match=why):
        trace(make(num_classes=4), (3, 64, 64))


def test_a_network_that_refuses_a_state_without_its_version_can_start_from_weights():
    make = partial(models.mnasnet0_5, num_classes=4)
    weights = make().state_dict()
    module = FederatedModule(make, partial(torch.optim.SGD, lr=0.1), cut=None, init_from=dict(weights))
    first = weights["layers.0.weight"].flatten()
    assert torch.equal(module.initial_model(0)[: len(first)], first)
