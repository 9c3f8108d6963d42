"""The compiled engine drops what torch drops."""

from functools import partial

import numpy as np
import pytest
import torch

from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.tracing import trace
from tests.engines.dropping_networks import (
    Dropping,
    DroppingAnyOrder,
    DroppingByFunctions,
    DroppingCausal,
    DroppingImage,
    DroppingJoined,
    DroppingMoved,
    DroppingNormalised,
    DroppingReshaped,
    DroppingSamples,
    DroppingSignal,
    DroppingTurned,
)
from tests.engines.networks import SHAPE
from tests.engines.test_compiled import TOLERANCE, batches_of, engines


@pytest.mark.parametrize("size", [1, 16, 40])
@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (Dropping, SHAPE),
        (DroppingSignal, (3, 9)),
        (DroppingCausal, (3, 10)),
        (partial(DroppingImage, 2), SHAPE),
        (partial(DroppingImage, 8), SHAPE),
        (DroppingByFunctions, SHAPE),
        (DroppingJoined, SHAPE),
        (DroppingSamples, SHAPE),
        (DroppingReshaped, (56,)),
        (DroppingNormalised, SHAPE),
        (DroppingTurned, SHAPE),
        (partial(DroppingAnyOrder, "pixel"), (1, 12, 12)),
    ],
)
def test_dropout_draws_the_masks_that_torch_draws(network, shape, size):
    pair = engines(network, shape, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    model, results = pair[0].module.initial_model(3), []
    for engine in pair:
        with engine.seeded(0, "test"):
            results.append(engine.run_optimizer(model, batches_of(size, size, 3)).model)
            results.append(engine.gradient(model, *batches_of(size)).vector)
            results.append(torch.rand(2))  # both have drawn as many numbers
    for expected, actual in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE)
    inputs, _ = pair[0].samples.batch(np.arange(9), torch.device("cpu"))
    scores = [engine.scorer(model)(inputs) for engine in pair]
    torch.testing.assert_close(*scores, **TOLERANCE)


@pytest.mark.parametrize("kind", ["input", "gate", "pooled", "range", "shuffled", "contiguous"])
def test_refuses_dropout_of_values_that_torch_orders_in_another_way(kind):
    with pytest.raises(Unsupported, match="dropout of tensors whose order in memory is not known"):
        trace(DroppingAnyOrder(kind), (1, 12, 12))


@pytest.mark.parametrize("kind", ["columns", "channels", "pixels", "rows", "moved", "back", "tokens"])
def test_refuses_dropout_of_tensors_whose_dimensions_have_changed_places(kind):
    with pytest.raises(Unsupported, match="dropout of tensors whose order in memory is not known"):
        trace(DroppingMoved(kind), SHAPE)


@pytest.mark.parametrize(
    "network", [partial(DroppingImage, 2), partial(DroppingImage, 8), DroppingJoined, DroppingSamples, DroppingTurned]
)
def test_masks_do_not_depend_on_the_order_of_the_inputs_in_memory(network):
    """An augmentation may return another order."""
    model, vectors = None, []
    for order in (torch.contiguous_format, torch.channels_last):
        for engine in engines(network, SHAPE):
            engine.samples.augmentation = lambda inputs, order=order: inputs.contiguous(memory_format=order)
            model = engine.module.initial_model(3) if model is None else model
            with engine.seeded(0, "test"):
                vectors.append(engine.gradient(model, *batches_of(17)).vector)
    for vector in vectors[1:]:
        torch.testing.assert_close(vector, vectors[0], **TOLERANCE)
