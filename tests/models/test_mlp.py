"""The multilayer perceptron: its parameter counts, and its layers one by one."""

import pytest
import torch

from lcfl.models import MLP, Layout


@pytest.mark.parametrize(
    ("arguments", "num_parameters", "num_embedding"),
    [
        ((784, [200], 10), 159_010, 157_000),  # IFCA's network, as in the literature
        ((64,), 4_810, 4_160),
        ((16, [32, 8], 4), 16 * 32 + 32 + 32 * 8 + 8 + 36, 16 * 32 + 32 + 32 * 8 + 8),
        ((16, [], 4), 68, 0),
    ],
)
def test_parameter_counts(arguments, num_parameters, num_embedding):
    layout = Layout.from_network(MLP(*arguments))
    assert (layout.num_parameters, layout.num_embedding, layout.size) == (num_parameters, num_embedding, num_parameters)


def test_the_output_equals_that_of_the_layers_one_by_one():
    network = MLP(12, [5, 4], 3)
    inputs = torch.randn(6, 3, 2, 2)
    x = inputs.reshape(6, 12)
    for layer in (network.embedding.fc1, network.embedding.fc2):
        x = (x @ layer.weight.T + layer.bias).clamp(min=0)
    torch.testing.assert_close(network(inputs), x @ network.decision.weight.T + network.decision.bias)


def test_without_hidden_layers_it_is_logistic_regression():
    network = MLP(4, [], 3)
    inputs = torch.randn(5, 2, 2)
    torch.testing.assert_close(
        network(inputs), inputs.reshape(5, 4) @ network.decision.weight.T + network.decision.bias
    )
