"""The split w = (phi, h) of a network into embedding and decision head."""

from typing import Protocol

from torch import Tensor, nn

__all__ = ["NetworkFactory", "SplitNetwork", "split"]


class NetworkFactory(Protocol):
    """Anything that makes a new network when called: a class, a function, or a ``functools.partial``."""

    def __call__(self) -> nn.Module:
        """Returns a newly initialised network."""
        ...


class SplitNetwork(nn.Module):
    """A pair of modules that are applied one after the other: ``decision(embedding(x))``."""

    def __init__(self, embedding: nn.Module, decision: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.decision = decision

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the class scores of a batch."""
        scores: Tensor = self.decision(self.embedding(inputs))
        return scores


def split(embedding: NetworkFactory, decision: NetworkFactory) -> SplitNetwork:
    """Makes a `SplitNetwork` from two factories. This is the function to name in a YAML file.

    In the file, each factory is a class with its ``init_args``, and each call of it makes a new module.
    """
    return SplitNetwork(embedding(), decision())
