"""Which parts make a method, and which do not fit together."""

import pytest

from lcfl.aggregation import ClusterMean, GlobalMean, NoAggregation
from lcfl.clustering import LowRankCosine
from lcfl.exchange import CentreAndEmbedding, FullModel, NoExchange
from lcfl.local import LocalTraining
from lcfl.method import Method

PARTICIPANTS = ClusterMean("participants", "participants")


def method(exchange, aggregation, *clustering):
    return Method(LocalTraining(steps=1), exchange, aggregation, list(clustering))


@pytest.mark.parametrize(
    ("exchange", "aggregation", "clustering"),
    [
        (CentreAndEmbedding(), ClusterMean(), [LowRankCosine()]),
        (CentreAndEmbedding(), PARTICIPANTS, [LowRankCosine()]),
        (CentreAndEmbedding(), ClusterMean(), []),
        (CentreAndEmbedding(), GlobalMean(), []),
        (FullModel(), GlobalMean(), []),
        (FullModel(), PARTICIPANTS, []),
        (NoExchange(), NoAggregation(), []),
    ],
)
def test_parts_that_fit(exchange, aggregation, clustering):
    made = method(exchange, aggregation, *clustering)
    assert made.is_clustered == bool(clustering)


@pytest.mark.parametrize("aggregation", [GlobalMean(), PARTICIPANTS, ClusterMean()])
def test_nothing_to_merge(aggregation):
    name = type(aggregation).__name__
    with pytest.raises(ValueError, match=f"{name} reads model .* and NoExchange uploads nothing. Use another exchange"):
        method(NoExchange(), aggregation)


def test_nothing_to_cluster():
    with pytest.raises(ValueError, match=r"LowRankCosine reads model .* NoExchange uploads nothing"):
        method(NoExchange(), NoAggregation(), LowRankCosine())


def test_one_model_for_all_and_clusters():
    with pytest.raises(ValueError, match="LowRankCosine needs a centre for every cluster, and GlobalMean makes one"):
        method(CentreAndEmbedding(), GlobalMean(), LowRankCosine())


@pytest.mark.parametrize(("over", "embedding_over"), [("stored", "participants"), ("participants", "stored")])
def test_a_mean_over_stored_models_needs_stored_models(over, embedding_over):
    with pytest.raises(ValueError, match=r"ClusterMean over stored models .* FullModel keeps none. Set over"):
        method(FullModel(), ClusterMean(over, embedding_over))
