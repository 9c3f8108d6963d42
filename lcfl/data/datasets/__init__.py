"""Data sets: what lcfl knows about them without reading a file, how it obtains them and turns them into `Samples`."""

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
