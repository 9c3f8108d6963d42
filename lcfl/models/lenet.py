"""LeNet-5 as the federated-learning literature uses it: with ReLU and max pooling, and by default without padding."""

from collections import OrderedDict

from torch import nn

from lcfl.models.split_network import SplitNetwork

__all__ = ["LeNet5"]


class LeNet5(SplitNetwork):
    """conv 6 k5 - pool - conv 16 k5 - pool - fc 120 - fc 84 - fc `num_classes`.

    The last fully connected layer is the decision head h, and all layers before it are the embedding phi (LCFed section
    IV-A). The network has 62,006 parameters (61,156 in phi) for colour images of 32 pixels with 10 classes. For grey
    images of 28 pixels it has 44,426 (43,576 in phi), or 61,706 (60,856 in phi) with `padding` 2 in the first
    convolution.

    Args:
        in_channels: number of channels of an image.
        image_size: height and width of an image, in pixels; at least 16 together with both paddings.
        num_classes: number of classes.
        padding: padding of the first convolution, in pixels.
    """

    def __init__(self, in_channels: int = 3, image_size: int = 32, num_classes: int = 10, padding: int = 0) -> None:
        side = ((image_size + 2 * padding - 4) // 2 - 4) // 2
        if side < 1:
            raise ValueError(
                f"LeNet5: image_size {image_size} with padding {padding} leaves no pixel; use at least "
                f"{16 - 2 * padding}."
            )
        embedding = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(in_channels, 6, kernel_size=5, padding=padding),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(6, 16, kernel_size=5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(16 * side * side, 120),
                relu3=nn.ReLU(),
                fc2=nn.Linear(120, 84),
                relu4=nn.ReLU(),
            )
        )
        super().__init__(embedding, nn.Linear(84, num_classes))
