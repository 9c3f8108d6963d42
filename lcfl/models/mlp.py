"""A multilayer perceptron."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from lcfl.models.split_network import SplitNetwork

__all__ = ["MLP"]


class MLP(SplitNetwork):
    """Fully connected layers with ReLU. Inputs are flattened, and the last layer is the decision head.

    Args:
        in_features: how many numbers an input has, e.g. 64 for an 8 x 8 image.
        hidden: widths of the hidden layers; an empty list gives logistic regression without an embedding.
        num_classes: number of classes.
        batch_norm: whether to put a BatchNorm between each hidden layer and its ReLU.
    """

    def __init__(
        self, in_features: int, hidden: Sequence[int] = (64,), num_classes: int = 10, batch_norm: bool = False
    ) -> None:
        widths = [in_features, *hidden]
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for number, (width_in, width_out) in enumerate(pairwise(widths), start=1):
            layers[f"fc{number}"] = nn.Linear(width_in, width_out)
            if batch_norm:
                layers[f"norm{number}"] = nn.BatchNorm1d(width_out)
            layers[f"relu{number}"] = nn.ReLU()
        super().__init__(nn.Sequential(layers), nn.Linear(widths[-1], num_classes))
