"""VGG-16 for small images."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from lcfl.models.split_network import SplitNetwork

__all__ = ["VGG16"]

BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG16(SplitNetwork):
    """Thirteen 3 x 3 convolutions in five blocks with pooling, and three fully connected layers.

    Layers are numbered as in FedClust's Fig. 1: ``embedding.conv1`` to ``conv13``, ``embedding.fc14``,
    ``embedding.fc15``, and the sixteenth layer, the decision head. Two hidden layers of width 512 are usual for images
    of 32 pixels (the paper gives no widths). With them and 10 classes, the network has 15,245,130 parameters,
    15,240,000 in phi. In torchvision's VGG-16, 119 of 134 million parameters lie in fully connected layers. To use it
    instead, name ``torchvision.models.vgg16`` with `model.cut` ``classifier.6`` (its last layer) or ``classifier``.

    Args:
        in_channels: number of channels of an image.
        image_size: height and width of an image, in pixels; at least 32.
        num_classes: number of classes.
        hidden: widths of the fully connected layers before the decision head.
        dropout: probability with which each output of these layers is set to zero in training.
    """

    def __init__(
        self,
        in_channels: int = 3,
        image_size: int = 32,
        num_classes: int = 10,
        hidden: Sequence[int] = (512, 512),
        dropout: float = 0.5,
    ) -> None:
        side = image_size // 2 ** len(BLOCKS)
        if side < 1:
            raise ValueError(f"VGG16: image_size {image_size} is too small for five pooling layers; use at least 32.")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        number, channels = 0, in_channels
        for block, widths in enumerate(BLOCKS, start=1):
            for width in widths:
                number += 1
                layers[f"conv{number}"] = _he(nn.Conv2d(channels, width, kernel_size=3, padding=1))
                layers[f"relu{number}"] = nn.ReLU()
                channels = width
            layers[f"pool{block}"] = nn.MaxPool2d(2)
        layers["flatten"] = nn.Flatten()
        features = [channels * side * side, *hidden]
        for number, (width_in, width_out) in enumerate(pairwise(features), start=14):
            layers[f"fc{number}"] = _he(nn.Linear(width_in, width_out))
            layers[f"relu{number}"] = nn.ReLU()
            layers[f"dropout{number}"] = nn.Dropout(dropout)
        super().__init__(nn.Sequential(layers), nn.Linear(features[-1], num_classes))


def _he(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    """Draws weights as He et al. do for ReLU. With torch's default, signals fade in so deep a network without norms."""
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
