"""Every clustering with every local update, exchange and aggregation: trains two rounds, or is refused in words."""

import re
from dataclasses import fields
from functools import partial
from inspect import isabstract
from itertools import product
from pathlib import Path

import pytest
import torch

from lcfl.data.datamodule import FederatedDataModule
from lcfl.federation.checks import check_method
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
    ChoiceBeforeTraining,
    ClientChoice,
    ClusterNumberTuning,
    GreedyIncentive,
    HierarchicalUpdates,
    LossVectorKMeans,
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
OTHER_ROUNDS = {"AdaptiveInitialisation", "GradientStep", "LeastLoss", "LossVector", "PixelSignature"}
OTHER_ROUNDS |= {"ClusterChoice", "ClusterLosses", "NamedLayers", "Signature"}


def concrete(module, base):
    kinds = {name: getattr(module, name) for name in module.__all__}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, base) and not isabstract(kind) and name not in OTHER_ROUNDS
    }


OPTIONS = {
    "AlternatingTraining": {"head_steps": 2},
    "EnvelopeTraining": {"inner_lr": 0.05, "outer_lr": 0.05},
    "FineTunedTraining": {"fine_tuning_epochs": 1},
    "InitialisedTraining": {"most_passes": 2},
}
LOCAL_UPDATES = concrete(local, LocalUpdate)
EXCHANGES = concrete(exchange, Exchange) | {"OwnLayers": partial(exchange.OwnLayers, ["decision"])}  # without BatchNorm
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
    "BlendedClusterMean over stored": BlendedClusterMean,
    "BlendedClusterMean": partial(BlendedClusterMean, "participants", "participants"),
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
    "OneShotHierarchical": lambda: [OneShotHierarchical(num_clusters=2, choose=None)],
    "ChoiceBeforeTraining": lambda: [ChoiceBeforeTraining(2)],
    "ClientChoice": lambda: [ClientChoice(2)],
    "LossVectorKMeans": lambda: [LossVectorKMeans(2)],
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
    assert used == set(concrete(clustering, clustering.Clustering)) - {"Clustering"}


def compositions(name):
    """Yields the local update of this name with every start, exchange and aggregation."""
    kind, options = LOCAL_UPDATES[name], {"steps": 2, **OPTIONS.get(name, {})}
    has_start = any(field.name == "start" and field.init for field in fields(kind))
    for start, sent, merged in product(("own", "centre", "embedding"), EXCHANGES, AGGREGATIONS):
        if start == "own" or (has_start and "," not in merged):
            update = kind(**options, **({} if start == "own" else {"start": start}))
            yield update, EXCHANGES[sent], AGGREGATIONS[merged]


PAGE = Path(__file__).parents[2] / "docs" / "howto" / "compositions.md"


def paired(head):
    """Returns the rows of the table on the page whose first column has this head: what each entry goes with."""
    table = PAGE.read_text().partition(f"| {head} |")[2].partition("\n\n")[0]
    rows = {row.split("|")[1]: re.findall(r"`(\w+)`", row.split("|")[2]) for row in table.splitlines()[2:]}
    general = rows.get(" general ", [])
    return {
        names[0] if (names := re.findall(r"`(\w+)`", first)) else "none": {
            each for name in others for each in (general if name == "general" else [name])
        }
        for first, others in rows.items()
        if first != " general "
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_says_which_parts_go_together():
    module, accepted = blobs_module(cluster_weight=0.1, global_weight=0.1), set()
    for grouping, name in product(CLUSTERINGS, LOCAL_UPDATES):
        for update, sent, merged in compositions(name):
            try:
                method = Method(update, sent(), merged(), CLUSTERINGS[grouping]())
                check_method(method, module, 6)
            except ValueError:
                continue
            parts = (type(each).__name__ for each in (method.exchange, method.aggregation))
            accepted.add((grouping.partition(" over")[0], name, *parts))

    def pairs(first, second):
        found = {}
        for each in accepted:
            found.setdefault(each[first], set()).add(each[second])
        return found

    of_update, of_clustering, of_exchange = paired("local update"), paired("clustering"), paired("exchange")
    assert (of_update, of_clustering, of_exchange) == (pairs(1, 2), pairs(0, 2), pairs(2, 3))
    needs_centres = {"GlobalMean", "NormalisedMean"}  # with these there is one model for all clients
    assert accepted == {
        (grouping, name, sent, merged)
        for grouping, sents in of_clustering.items()
        for name, others in of_update.items()
        for sent in sents & others
        for merged in of_exchange[sent]
        if grouping == "none" or merged not in needs_centres
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("grouping", "name"), list(product(CLUSTERINGS, LOCAL_UPDATES)))
def test_every_composition_trains_or_is_refused_before_data_are_read(tmp_path, grouping, name):
    for number, (update, sent, merged) in enumerate(compositions(name)):
        try:
            outcome(lambda: Method(update, sent(), merged(), CLUSTERINGS[grouping]()), tmp_path / str(number))  # noqa: B023
        except Exception as error:
            error.add_note(f"{grouping}, {update}, {sent}, {merged}")
            raise
