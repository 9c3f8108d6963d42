"""Results of a stacked step other than weights: buffers, logged values, and parameters that are not trained."""

from functools import partial

import pytest
import torch

from lcfl.engines import SequentialEngine, StackedEngine
from lcfl.models.module import FederatedModule
from tests.engines.networks import Counting, Frozen, Inner, Watching
from tests.engines.test_stacked import SIZES, assert_same_runs, batches_of, both, engines, model_of


class LoggingScores(FederatedModule):
    """Logs in `forward`, so that the training step is lcfl's."""

    def forward(self, inputs):
        scores = super().forward(inputs)
        if self.training:
            self.log("size", scores.detach().norm())
        return scores


@pytest.mark.parametrize(
    ("module", "ignores_padding"),
    [
        (partial(FederatedModule, Frozen), True),
        (partial(FederatedModule, Counting), True),
        (partial(FederatedModule, Watching), False),
        (partial(LoggingScores, Inner), False),
    ],
)
def test_results_of_a_step_other_than_weights(module, ignores_padding):
    """Batches are padded only if the padding does not change a buffer or a logged value."""
    sequential, _ = engines(Inner, (7,))
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    stacked = StackedEngine(sequential.fabric, module(optimizer), sequential.samples, (7,), torch.float32, 32)
    pair = SequentialEngine(sequential.fabric, module(optimizer), sequential.samples), stacked
    assert stacked._ignores_padding == ignores_padding
    runs = both(pair, lambda i, engine: engine.run_optimizer(model_of(engine, i), batches_of(i, SIZES[i])))
    assert_same_runs(*runs)
