"""Data sets: what is known of them without reading a file, how they get here, and how they become ``Samples``."""

from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.datasets.bundled import Digits, RandomLike, Synthetic
from lcfl.data.datasets.custom import Datasets, Tensors
from lcfl.data.datasets.images import CIFAR10, CIFAR100, EMNIST, MNIST, SVHN, FashionMNIST, TorchvisionImages

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "MNIST",
    "SVHN",
    "Datasets",
    "Digits",
    "FashionMNIST",
    "FederatedDataset",
    "RandomLike",
    "Synthetic",
    "Tensors",
    "TorchvisionImages",
]
