"""Every clustering with every local update, exchange and aggregation: trains two rounds, or is refused in words."""

from dataclasses import fields
from functools import partial
from inspect import isabstract
from itertools import product

import pytest
import torch

from lcfl.data.datamodule import FederatedDataModule
from lcfl.methods import aggregation, clustering, exchange, local
from lcfl.methods.aggregation import (
    BlendedClusterMean,
    ClusterMean,
    CoordinateMedian,
    GlobalMean,
    NoAggregation,
    NormalisedMean,
    ServerAdam,
    ServerDynamics,
    UpdateMean,
)
from lcfl.methods.clustering import (
    ClientChoice,
    ClusterNumberTuning,
    GreedyIncentive,
    HierarchicalUpdates,
    LowRankCosine,
    ModelKMeans,
    OneShotHierarchical,
    PrincipalAngles,
    RecursiveBipartition,
    RefreshedLowRankCosine,
    SplitAndMerge,
    UpdateDirections,
    UpdateEM,
)
from lcfl.methods.exchange import Exchange
from lcfl.methods.local import LocalUpdate
from lcfl.methods.method import Method
from tests.helpers.builders import blobs, blobs_module, fit

# Parts of warm-up rounds and of evaluations, which train no client for a round.
OTHER_ROUNDS = {"GradientStep", "LeastLoss", "PixelSignature", "NamedLayers", "Signature", "ClusterChoice"}


def concrete(module, base):
    kinds = {name: getattr(module, name) for name in module.__all__}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, base) and not isabstract(kind) and name not in OTHER_ROUNDS
    }


STEPS = {"EnvelopeTraining": {"steps": 2, "inner_lr": 0.05, "outer_lr": 0.05}}
STARTS = ("own", "centre", "embedding")


def local_updates(name):
    """Returns a local update with each start that it takes."""
    kind, options = LOCAL_UPDATES[name], STEPS.get(name, {"steps": 2})
    if "start" not in {field.name for field in fields(kind)}:
        return [kind(**options)]
    return [kind(**options, start=start) for start in STARTS]


LOCAL_UPDATES = concrete(local, LocalUpdate)
EXCHANGES = concrete(exchange, Exchange)
PARTICIPANTS = partial(ClusterMean, "participants", "participants")
AGGREGATIONS = {
    "GlobalMean": GlobalMean,
    "GlobalMean, median": partial(GlobalMean, rule=CoordinateMedian()),
    "GlobalMean, Adam": partial(GlobalMean, optimizer=ServerAdam()),
    "GlobalMean, dynamics": partial(GlobalMean, optimizer=ServerDynamics()),
    "ClusterMean over stored": ClusterMean,
    "ClusterMean": PARTICIPANTS,
    "ClusterMean, median": partial(PARTICIPANTS, rule=CoordinateMedian()),
    "ClusterMean, Adam": partial(PARTICIPANTS, optimizer=ServerAdam()),
    "ClusterMean, dynamics": partial(PARTICIPANTS, optimizer=ServerDynamics()),
    "BlendedClusterMean": BlendedClusterMean,
    "UpdateMean": UpdateMean,
    "NormalisedMean": NormalisedMean,
    "NoAggregation": NoAggregation,
}
CLUSTERINGS = {
    "none": list,
    "LowRankCosine": lambda: [LowRankCosine(2, dimension=3)],
    "RefreshedLowRankCosine": lambda: [
        RefreshedLowRankCosine(2, dimension=3, refresh_every=1),
        ClusterNumberTuning("silhouette", cooldown=0),
    ],
    "GreedyIncentive": lambda: [GreedyIncentive(), UpdateEM(), SplitAndMerge()],
    "OneShotHierarchical": lambda: [OneShotHierarchical(num_clusters=2)],
    "ClientChoice": lambda: [ClientChoice(2)],
    "ModelKMeans": lambda: [ModelKMeans(2, "participants")],
    "ModelKMeans over stored": lambda: [ModelKMeans(2, "stored")],
    "RecursiveBipartition": lambda: [RecursiveBipartition(eps1=10.0, eps2=0.0)],
    "UpdateDirections": lambda: [UpdateDirections(2, 2, 2)],
    "HierarchicalUpdates": lambda: [HierarchicalUpdates(1, num_clusters=2)],
    "PrincipalAngles": lambda: [PrincipalAngles(num_clusters=2)],
}


class Loading(FederatedDataModule):
    """Data that count how often they are read."""

    reads = 0

    def setup(self, stage=None):
        Loading.reads += 1
        super().setup(stage)


def outcome(method, root):
    """Returns whether a method trains; a refusal must come before data are read."""
    data = blobs(6, proxy=20)
    data.__class__ = Loading
    Loading.reads = 0
    try:
        watch = fit(blobs_module(cluster_weight=0.1, global_weight=0.1), data, method(), root, rounds=2)
    except ValueError as error:
        assert Loading.reads == 0, f"refused after data were read: {error}"
        assert len(str(error)) > 40
        return False
    assert len(watch.rows) == 2
    assert torch.isfinite(watch.state.centres).all()
    return True


def test_the_matrix_has_every_part():
    assert {name.partition(",")[0].partition(" over")[0] for name in AGGREGATIONS} == set(
        concrete(aggregation, aggregation.Aggregation)
    )
    used = {type(part).__name__ for make in CLUSTERINGS.values() for part in make()}
    assert used == set(concrete(clustering, clustering.Clustering))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("grouping", "name"), list(product(CLUSTERINGS, LOCAL_UPDATES)))
def test_every_composition_trains_or_is_refused_before_data_are_read(tmp_path, grouping, name):
    trained = set()
    for number, (update, sent, merged) in enumerate(product(local_updates(name), EXCHANGES, AGGREGATIONS)):

        def method(update=update, sent=sent, merged=merged):
            return Method(update, EXCHANGES[sent](), AGGREGATIONS[merged](), CLUSTERINGS[grouping]())

        try:
            if outcome(method, tmp_path / str(number)):
                trained.add((sent, merged))
        except Exception as error:
            error.add_note(f"{grouping}, {update}, {sent}, {merged}")
            raise
