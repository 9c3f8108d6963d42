"""A data set and a network of one's own."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import Dataset


class Tumours(Dataset):
    """569 breast tumours: 30 measurements each, benign or malignant."""

    def __init__(self):
        inputs, self.labels = load_breast_cancer(return_X_y=True)
        self.inputs = torch.tensor((inputs - inputs.mean(0)) / inputs.std(0), dtype=torch.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], int(self.labels[index])


class Net(nn.Module):
    """A body, whose mean over clients is the global embedding, and a head."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(30, width), nn.ReLU())
        self.head = nn.Linear(width, 2)

    def forward(self, inputs):
        """Class scores."""
        return self.head(self.body(inputs))
