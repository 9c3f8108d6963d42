"""Data sets: what lcfl knows about them without reading a file, how it obtains them and turns them into `Samples`."""

from lcfl.data.datasets.arrays import Arrays
from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.datasets.bundled import Digits, RandomLike, Synthetic
from lcfl.data.datasets.custom import Datasets, Tensors
from lcfl.data.datasets.folders import Folders
from lcfl.data.datasets.image_files import ImageFiles
from lcfl.data.datasets.images import CIFAR10, CIFAR100, EMNIST, MNIST, SVHN, FashionMNIST, TorchvisionImages
from lcfl.data.datasets.readers import Reader
from lcfl.data.datasets.table import Table

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "MNIST",
    "SVHN",
    "Arrays",
    "Datasets",
    "Digits",
    "FashionMNIST",
    "FederatedDataset",
    "Folders",
    "ImageFiles",
    "RandomLike",
    "Reader",
    "Synthetic",
    "Table",
    "Tensors",
    "TorchvisionImages",
]
