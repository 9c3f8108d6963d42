"""A user-defined data set and network."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import TensorDataset


class Tumours(TensorDataset):
    """569 breast tumours with 30 measurements each, benign or malignant. Any map-style Dataset works."""

    def __init__(self):
        inputs, labels = load_breast_cancer(return_X_y=True)
        super().__init__(torch.tensor((inputs - inputs.mean(0)) / inputs.std(0)).float(), torch.tensor(labels))


class Net(nn.Module):
    """A network with a body, whose mean over clients is the global embedding, and a head."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(30, width), nn.ReLU())
        self.head = nn.Linear(width, 2)

    def forward(self, inputs):
        return self.head(self.body(inputs))
