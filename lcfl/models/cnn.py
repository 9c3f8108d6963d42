"""A family of small networks on which papers compare methods: convolutions with pooling and fully connected layers."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from lcfl.models.split_network import SplitNetwork

__all__ = ["CNN"]


class CNN(SplitNetwork):
    """Blocks of convolution, ReLU and 2 x 2 max pooling, followed by fully connected layers with ReLU.

    The last fully connected layer is the decision head h, and all layers before it are the embedding phi. With the cut
    ``embedding.fc1``, phi consists of the convolutions alone (reading A28). With the defaults, the network has
    4,778,954 parameters for 10 classes (4,773,824 in phi) and 4,825,124 for 100. The defaults are inferred. FedAC
    reports two convolutions, three fully connected layers and more than 4,700,000 parameters, and LCFed reports more
    than 4,800,000. Among the networks of that shape whose widths are powers of two, this is one of few that fit both
    papers, the first with CIFAR-10 and the second with CIFAR-100.

    Other widths give the networks of other papers, with the same numbers of parameters:

    ======================  ========  ======  =======  ==========  =========
    network                 channels  kernel  padding  hidden      P
    ======================  ========  ======  =======  ==========  =========
    PFLlib's FedAvgCNN      32, 64    5       0        512         878,538
    LG-FedAvg's CNNCifar    6, 16     5       0        120, 100    64,102
    CFL's ConvNet (EMNIST)  6, 16     5       0        none        18,506
    LEAF's CNN (FEMNIST)    32, 64    5       2        2048        6,603,710
    PACFL's simple-cnn-3    18, 48    5       0        360, 252    571,648
    IFCA's CNN, 24 pixels   64, 64    5       2        384, 192    1,068,298
    FL-bench's LeNet5       6, 16     5       0        120, 84     62,050
    ======================  ========  ======  =======  ==========  =========

    IFCA's network pools over 3 x 3 pixels and normalises local responses, which this class does not do. FL-bench's
    network uses `batch_norm`. PACFL's has 100 classes. CFL's and LEAF's have 62 classes and take grey images of 28
    pixels. All others are for CIFAR-10.

    Args:
        in_channels: number of channels of an image.
        image_size: height and width of an image, in pixels.
        num_classes: number of classes.
        channels: number of output channels of each convolution.
        kernel_size: height and width of each convolution's kernel.
        padding: padding of each convolution, in pixels.
        hidden: widths of the fully connected layers before the decision head; may be empty.
        batch_norm: whether to put a BatchNorm between each convolution and its ReLU. Its running statistics travel
            with the model and are averaged like parameters.

    Raises:
        ValueError: if the images are too small for the number of convolutions.
    """

    def __init__(
        self,
        in_channels: int = 3,
        image_size: int = 32,
        num_classes: int = 10,
        channels: Sequence[int] = (32, 64),
        kernel_size: int = 5,
        padding: int = 2,
        hidden: Sequence[int] = (1024, 512),
        batch_norm: bool = False,
    ) -> None:
        side = image_size
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for number, (width_in, width_out) in enumerate(pairwise([in_channels, *channels]), start=1):
            layers[f"conv{number}"] = nn.Conv2d(width_in, width_out, kernel_size, padding=padding)
            if batch_norm:
                layers[f"norm{number}"] = nn.BatchNorm2d(width_out)
            layers[f"relu{number}"] = nn.ReLU()
            layers[f"pool{number}"] = nn.MaxPool2d(2)
            side = (side + 2 * padding - kernel_size + 1) // 2
        if side < 1:
            raise ValueError(
                f"CNN: image_size {image_size} leaves no pixel after {len(channels)} convolutions with kernel_size "
                f"{kernel_size} and padding {padding}; use larger images, fewer channels or more padding."
            )
        layers["flatten"] = nn.Flatten()
        widths = [[in_channels, *channels][-1] * side * side, *hidden]
        for number, (width_in, width_out) in enumerate(pairwise(widths), start=1):
            layers[f"fc{number}"] = nn.Linear(width_in, width_out)
            layers[f"relu{len(channels) + number}"] = nn.ReLU()
        super().__init__(nn.Sequential(layers), nn.Linear(widths[-1], num_classes))
