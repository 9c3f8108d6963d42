"""The split w = (phi, h) of a network into embedding and decision."""

from typing import Protocol

from torch import Tensor, nn

__all__ = ["NetworkFactory", "SplitNetwork", "split"]


class NetworkFactory(Protocol):
    """Anything that makes a new network when called: a class, a function, a ``functools.partial``."""

    def __call__(self) -> nn.Module:
        """A newly initialised network."""
        ...


class SplitNetwork(nn.Module):
    """A pair of modules, applied one after the other: ``decision(embedding(x))``."""

    def __init__(self, embedding: nn.Module, decision: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.decision = decision

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores of a batch."""
        scores: Tensor = self.decision(self.embedding(inputs))
        return scores


def split(embedding: NetworkFactory, decision: NetworkFactory) -> SplitNetwork:
    """Makes a `SplitNetwork` out of two factories: the form to name in a YAML file.

    There each of the two is a class with its ``init_args``, and each call gives new modules.
    """
    return SplitNetwork(embedding(), decision())
