"""ResNet-9 with group normalisation, which has no running statistics to average."""

from collections import OrderedDict

from torch import Tensor, nn

from lcfl.models.split_network import SplitNetwork

__all__ = ["ResNet9"]

NUM_GROUPS = 32


class ResNet9(SplitNetwork):
    """Eight convolutions, two shortcuts and one fully connected layer, which is the decision head h.

    conv 64 - conv 128, pool - residual 2 x 128 - conv 256, pool - conv 512, pool - residual 2 x 512 - max pool
    over the remaining pixels - fc. Every convolution is 3 x 3 with bias and is followed by GroupNorm of 32 groups and
    ReLU, as in PACFL's code, and so in FedClust's for CIFAR-100. The network has 6,621,540 parameters with 100 classes
    (6,570,240 in phi) and 6,575,370 with 10.

    Args:
        in_channels: number of channels of an image.
        image_size: height and width of an image, in pixels; at least 8.
        num_classes: number of classes.
    """

    def __init__(self, in_channels: int = 3, image_size: int = 32, num_classes: int = 10) -> None:
        if image_size < 8:
            raise ValueError(f"ResNet9: image_size {image_size} is too small for three pooling layers; use at least 8.")
        embedding = nn.Sequential(
            OrderedDict(
                conv1=_block(in_channels, 64),
                conv2=_block(64, 128, pool=True),
                residual1=_Residual(128),
                conv3=_block(128, 256, pool=True),
                conv4=_block(256, 512, pool=True),
                residual2=_Residual(512),
                pool=nn.MaxPool2d(image_size // 8),
                flatten=nn.Flatten(),
            )
        )
        super().__init__(embedding, nn.Linear(512, num_classes))


class _Residual(nn.Module):
    """A residual connection, x + block(block(x))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_block(channels, channels), _block(channels, channels))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.blocks(inputs)
        return inputs + outputs


def _block(channels_in: int, channels_out: int, pool: bool = False) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1),
        norm=nn.GroupNorm(NUM_GROUPS, channels_out),
        relu=nn.ReLU(),
    )
    if pool:
        layers["pool"] = nn.MaxPool2d(2)
    return nn.Sequential(layers)
