"""Networks, their split into embedding and decision head, their flat vectors, and the LightningModule."""

from lcfl.models.adapters import lora
from lcfl.models.char_lstm import CharLSTM
from lcfl.models.cnn import CNN
from lcfl.models.layout import Layout
from lcfl.models.lenet import LeNet5
from lcfl.models.mlp import MLP
from lcfl.models.resnet9 import ResNet9
from lcfl.models.split_network import NetworkFactory, SplitNetwork, split
from lcfl.models.transformer import huggingface
from lcfl.models.vgg import VGG16

__all__ = [
    "CNN",
    "MLP",
    "VGG16",
    "CharLSTM",
    "Layout",
    "LeNet5",
    "NetworkFactory",
    "ResNet9",
    "SplitNetwork",
    "huggingface",
    "lora",
    "split",
]
