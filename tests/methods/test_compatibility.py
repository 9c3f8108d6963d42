"""Tests of which parts make a method and which do not fit together."""

from dataclasses import replace

import pytest

from lcfl.methods.aggregation import ClusterMean, GlobalMean, NoAggregation, NormalisedMean
from lcfl.methods.clustering import LowRankCosine
from lcfl.methods.exchange import (
    AdaptedModel,
    AllCentres,
    CentreAndEmbedding,
    ClusterChoice,
    FullModel,
    GlobalReference,
    NoExchange,
    NormalisedModel,
    SharedEmbedding,
    SharedLayers,
    Signature,
)
from lcfl.methods.exchange.transforms import GaussianNoise
from lcfl.methods.local import LeastLossTraining, LocalTraining, MetaTraining, NormalisedTraining
from lcfl.methods.method import Method
from tests.helpers.builders import fednova, fedper, lg_fedavg
from tests.helpers.clustered import cgpfl, ifca

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
        (GlobalReference(), GlobalMean(), []),
        (SharedEmbedding(), PARTICIPANTS, []),
    ],
)
def test_parts_that_fit(exchange, aggregation, clustering):
    made = method(exchange, aggregation, *clustering)
    assert made.is_clustered == bool(clustering)


@pytest.mark.parametrize("aggregation", [GlobalMean(), PARTICIPANTS, ClusterMean()])
def test_an_aggregation_without_uploads_is_refused(aggregation):
    name = type(aggregation).__name__
    with pytest.raises(ValueError, match=f"{name} reads model .* NoExchange uploads nothing. Use .* it: .*FullModel"):
        method(NoExchange(), aggregation)


def test_a_clustering_without_uploads_is_refused():
    with pytest.raises(ValueError, match=r"LowRankCosine reads model .* NoExchange uploads nothing"):
        method(NoExchange(), NoAggregation(), LowRankCosine())


def test_a_clustering_with_one_model_for_all_clients_is_refused():
    with pytest.raises(ValueError, match="LowRankCosine needs a centre for every cluster, but GlobalMean makes one"):
        method(CentreAndEmbedding(), GlobalMean(), LowRankCosine())


@pytest.mark.parametrize(("over", "embedding_over"), [("stored", "participants"), ("participants", "stored")])
def test_a_mean_over_stored_models_needs_stored_models(over, embedding_over):
    with pytest.raises(ValueError, match=r"ClusterMean over stored models .* FullModel keeps none. Set over"):
        method(FullModel(), ClusterMean(over, embedding_over))


@pytest.mark.parametrize("exchange", [SharedEmbedding(), SharedLayers(1)])
def test_a_part_that_stays_with_a_client_cannot_be_merged(exchange):
    with pytest.raises(
        ValueError, match=rf"ClusterMean over stored models needs .* {type(exchange).__name__} keeps none"
    ):
        method(exchange, ClusterMean())


def test_a_normaliser_needs_a_local_update_that_provides_it():
    Method(NormalisedTraining(steps=1), NormalisedModel(), NormalisedMean())
    with pytest.raises(ValueError, match="NormalisedModel uploads normaliser, which LocalTraining does not provide"):
        method(NormalisedModel(), NormalisedMean())
    with pytest.raises(ValueError, match=r"NormalisedMean reads normaliser .* FullModel uploads model"):
        method(FullModel(), NormalisedMean())


def test_an_exchange_must_send_what_a_local_update_reads():
    Method(LeastLossTraining(steps=1), AllCentres(), PARTICIPANTS)
    with pytest.raises(
        ValueError, match=r"LeastLossTraining reads centres .* FullModel sends model\. .* it: AllCentres"
    ):
        Method(LeastLossTraining(steps=1), FullModel(), GlobalMean())


def test_an_adapted_model_needs_an_adaptation():
    Method(MetaTraining(steps=1), AdaptedModel(), GlobalMean())
    with pytest.raises(
        ValueError, match=r"AdaptedModel needs a local update with an adaptation, .* LocalTraining has none"
    ):
        method(AdaptedModel(), GlobalMean())


def test_offline_models_that_transforms_change_are_not_the_clients():
    exchange = CentreAndEmbedding(transforms=[GaussianNoise(clip=1.0, sigma=1.0)])
    with pytest.raises(ValueError, match="LowRankCosine with keep_offline_models gives clients what the server has"):
        Method(LocalTraining(steps=1), exchange, ClusterMean(), [LowRankCosine(4, keep_offline_models=True)])


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (fedper(), "SharedEmbedding uploads a part of the trained model, or a different model"),
        (lg_fedavg(), "SharedLayers uploads a part of the trained model, or a different model"),
        (cgpfl(), "EnvelopeModel uploads a part of the trained model, or a different model"),
        (fednova(), "NormalisedModel uploads normaliser"),
        (ifca(), "AllCentres uploads cluster"),
    ],
)
def test_transforms_need_uploads_of_whole_trained_models_only(made, says):
    exchange = replace(made.exchange, transforms=[GaussianNoise(clip=1.0, sigma=1.0)])
    text = rf"method.exchange: transforms work only on .*; {says}\. Set transforms: \[\]"
    with pytest.raises(ValueError, match=text):
        replace(made, exchange=exchange)


@pytest.mark.parametrize("exchange", [AllCentres(), ClusterChoice(), Signature()])
def test_a_local_update_that_lacks_what_is_uploaded_is_refused(exchange):
    with pytest.raises(ValueError, match=rf"{type(exchange).__name__} uploads {exchange.extras[0]}, which LocalTrai"):
        Method(LocalTraining(steps=1), exchange, NoAggregation())
