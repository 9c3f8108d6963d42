"""Networks, how they are split into embedding and decision, and how they lie in one flat vector."""

from lcfl.networks.cnn import CNN
from lcfl.networks.lenet import LeNet5
from lcfl.networks.mlp import MLP
from lcfl.networks.resnet9 import ResNet9
from lcfl.networks.split import Layout, MakesNetwork, SplitNetwork, split
from lcfl.networks.vgg import VGG16

__all__ = ["CNN", "MLP", "VGG16", "Layout", "LeNet5", "MakesNetwork", "ResNet9", "SplitNetwork", "split"]
