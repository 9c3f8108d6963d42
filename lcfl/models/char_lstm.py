"""The recurrent network with which LEAF predicts the next character."""

from torch import Tensor, nn

from lcfl.models.split_network import SplitNetwork

__all__ = ["CharLSTM"]


class CharLSTM(SplitNetwork):
    """Embedding of characters, stacked LSTM layers, and scores of the next character after the last one.

    It maps numbers of characters ``[B, T]``, int64, to scores ``[B, num_classes]``. The fully connected layer is the
    decision head, and all layers before it are the embedding phi. The defaults are LEAF's network for Shakespeare. It
    has 819,920 parameters, 2,048 more than in TensorFlow, because torch gives each LSTM layer two vectors of biases.

    Only the engine ``sequential`` trains it, because the kernels of the others have no LSTM.

    Args:
        num_characters: number of characters in the alphabet.
        num_classes: number of characters that may come next.
        embedding_size: length of the vector of a character.
        hidden: width of each LSTM layer.
        layers: number of LSTM layers.
    """

    def __init__(
        self,
        num_characters: int = 80,
        num_classes: int = 80,
        embedding_size: int = 8,
        hidden: int = 256,
        layers: int = 2,
    ) -> None:
        super().__init__(_LastState(num_characters, embedding_size, hidden, layers), nn.Linear(hidden, num_classes))


class _LastState(nn.Module):
    """The output of the last LSTM layer after the last character."""

    def __init__(self, num_characters: int, size: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_characters, size)
        self.lstm = nn.LSTM(size, hidden, layers, batch_first=True)

    def forward(self, numbers: Tensor) -> Tensor:
        """Returns ``[B, hidden]``."""
        outputs: Tensor = self.lstm(self.characters(numbers))[0]
        return outputs[:, -1]
