"""Data sets: what lcfl knows about them without reading a file, how it obtains them and turns them into `Samples`."""

from lcfl.data.datasets.arrays import Arrays
from lcfl.data.datasets.base import FederatedDataset
from lcfl.data.datasets.bundled import Digits, RandomLike, Synthetic
from lcfl.data.datasets.custom import Datasets, Tensors
from lcfl.data.datasets.folders import Folders
from lcfl.data.datasets.huggingface import HuggingFace
from lcfl.data.datasets.image_files import ImageFiles
from lcfl.data.datasets.images import CIFAR10, CIFAR100, EMNIST, MNIST, SVHN, FashionMNIST, TorchvisionImages
from lcfl.data.datasets.leaf import FEMNIST, LEAF, Shakespeare
from lcfl.data.datasets.medmnist import MedMNIST
from lcfl.data.datasets.readers import Reader
from lcfl.data.datasets.table import Table
from lcfl.data.datasets.ucihar import UCIHAR

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "FEMNIST",
    "LEAF",
    "MNIST",
    "SVHN",
    "UCIHAR",
    "Arrays",
    "Datasets",
    "Digits",
    "FashionMNIST",
    "FederatedDataset",
    "Folders",
    "HuggingFace",
    "ImageFiles",
    "MedMNIST",
    "RandomLike",
    "Reader",
    "Shakespeare",
    "Synthetic",
    "Table",
    "Tensors",
    "TorchvisionImages",
]
