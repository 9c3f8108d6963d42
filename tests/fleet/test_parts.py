"""Parts of a method are named by plain values, and a node builds only what it knows."""

import pytest

from lcfl.fleet.parcel import MessageError
from lcfl.fleet.parts import described_part, part_of
from lcfl.methods.exchange import ClusterChoice, Exchange, FullModel, NamedLayers, Signature
from lcfl.methods.exchange.transforms import GaussianNoise
from lcfl.methods.local import LeastLoss, LocalTraining, LocalUpdate, PixelSignature

LEAST = "lcfl.methods.local.least_loss.LeastLoss"


@pytest.mark.parametrize("part", [LeastLoss(), LocalTraining(steps=5, lr_decay=0.9), PixelSignature(2), None])
def test_local_updates_come_back(part):
    assert part_of(described_part(part), LocalUpdate) == part


@pytest.mark.parametrize("part", [FullModel(), ClusterChoice(), NamedLayers(["decision"]), NamedLayers(), Signature()])
def test_exchanges_come_back(part):
    again = part_of(described_part(part), Exchange)
    assert type(again) is type(part) and described_part(again) == described_part(part)


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ("LeastLoss", "named by its class and arguments"),
        ({"class": LEAST}, "named by its class and arguments"),
        ({"class": "os.system", "arguments": {}}, "'os.system' is no LocalUpdate that this node knows"),
        ({"class": "lcfl.methods.exchange.FullModel", "arguments": {}}, "is no LocalUpdate"),
        ({"class": ["os"], "arguments": {}}, "is no LocalUpdate"),
        ({"class": LEAST, "arguments": {"command": "ls"}}, "LeastLoss refuses its arguments"),
        ({"class": LEAST, "arguments": 3}, "LeastLoss refuses its arguments"),
        ({"class": "lcfl.methods.local.training.LocalTraining", "arguments": {"steps": "x"}}, "refuses its arguments"),
        ({"class": "lcfl.methods.local.training.LocalTraining", "arguments": {}}, "refuses its arguments"),
    ],
)
def test_a_node_builds_nothing_else(described, words):
    with pytest.raises(MessageError, match=words):
        part_of(described, LocalUpdate)


def test_a_part_with_other_values_cannot_be_named():
    with pytest.raises(MessageError, match="FullModel cannot be named in a message: transforms is a tuple"):
        described_part(FullModel(transforms=(GaussianNoise(sigma=1.0, clip=1.0),)))
