"""A node runs only what its own method can ask for, and messages name it by plain values."""

import pytest

from lcfl.fleet.parcel import MessageError
from lcfl.fleet.parts import described_part, evaluation_parts, training_parts
from lcfl.methods.exchange import ClusterChoice, ClusterLosses, FullModel, NamedLayers, Signature
from lcfl.methods.exchange.transforms import GaussianNoise
from lcfl.methods.local import LeastLoss, LocalTraining, LossVector, PixelSignature
from tests.helpers.builders import fedbabu, fedper, lcfed, per_fedavg
from tests.helpers.clustered import clove, fedgroup, ifca, pacfl
from tests.methods.clustering.test_one_shot import fedclust


def named(local_update=None, exchange=None):
    return {"local_update": described_part(local_update), "exchange": described_part(exchange)}


KNOWN = [
    (fedper, None, None),
    (lcfed, None, None),
    (ifca, LeastLoss(), ClusterChoice()),
    (clove, LossVector(), ClusterLosses()),
    (pacfl, PixelSignature(3), Signature()),
    (fedclust, None, NamedLayers()),
    (fedgroup, LocalTraining(steps=5), None),
    (fedgroup, LocalTraining(steps=5), FullModel()),
]


@pytest.mark.parametrize(("method", "update", "exchange"), KNOWN)
def test_a_node_trains_as_its_method_asks(method, update, exchange):
    found = training_parts(method(), 12, named(update, exchange))
    assert list(map(described_part, found)) == list(map(described_part, (update, exchange)))


@pytest.mark.parametrize(
    ("method", "update", "exchange"),
    [
        (fedper, None, FullModel()),  # would upload the head, too
        (fedper, LocalTraining(steps=1), None),
        (lcfed, PixelSignature(1000), Signature()),  # would upload what the samples look like
        (pacfl, PixelSignature(1000), Signature()),
        (ifca, LeastLoss(), FullModel()),
        (clove, LossVector(), FullModel()),
    ],
)
def test_a_node_trains_in_no_other_way(method, update, exchange):
    with pytest.raises(MessageError, match="the method of this node never asks for this"):
        training_parts(method(), 12, named(update, exchange))


def test_a_model_is_measured_after_the_work_that_makes_its_kind():
    for method in (fedbabu, per_fedavg):
        adaptation = method().local_update.adaptation
        assert evaluation_parts(method(), "personal", named(adaptation))[0] == adaptation
    assert evaluation_parts(lcfed(), "cluster", named()) == (None, None)
    assert evaluation_parts(lcfed(), "global", named(LocalTraining(epochs=3), FullModel()))[0].epochs == 3
    for update in (adaptation, PixelSignature(3), LocalTraining(epochs=3)):
        with pytest.raises(MessageError, match="never asks"):
            evaluation_parts(lcfed(), "personal", named(update))


@pytest.mark.parametrize("update", ["LeastLoss", 3, {"class": "os.system", "arguments": {"epochs": 1}}, {"class": []}])
def test_anything_else_as_a_part_is_refused(update):
    for parts in (
        lambda told: training_parts(lcfed(), 12, told),
        lambda told: evaluation_parts(lcfed(), "global", told),
    ):
        with pytest.raises(MessageError, match="never asks"):
            parts({"local_update": update, "exchange": None})


def test_a_part_with_other_values_cannot_be_named():
    with pytest.raises(MessageError, match="FullModel cannot be named in a message: transforms is a tuple"):
        described_part(FullModel(transforms=(GaussianNoise(sigma=1.0, clip=1.0),)))
