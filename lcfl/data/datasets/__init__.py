"""Data sets: what is known of them without reading a file, how they get here, and how they become ``Examples``."""

from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.datasets.fileless import Digits, RandomLike, Synthetic
from lcfl.data.datasets.images import CIFAR10, CIFAR100, EMNIST, MNIST, SVHN, FashionMNIST, TorchvisionImages
from lcfl.data.datasets.own import Datasets, Tensors

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
