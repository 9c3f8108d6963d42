"""Networks, how they are split into embedding and decision, and how they lie in one flat vector."""

from lcfl.networks.lenet import LeNet5
from lcfl.networks.mlp import MLP
from lcfl.networks.split import Layout, MakesNetwork, SplitNetwork, split

__all__ = ["MLP", "Layout", "LeNet5", "MakesNetwork", "SplitNetwork", "split"]
