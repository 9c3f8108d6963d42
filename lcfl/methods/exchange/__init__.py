"""Exchanges, which define what goes down to a client and what comes up from it."""

from lcfl.methods.exchange.attentive import AttentiveReference
from lcfl.methods.exchange.base import Exchange, ModelKind
from lcfl.methods.exchange.cluster_models import AllCentres, ClusterChoice, ClusterLosses, ClusterModel, ClusterUpdate
from lcfl.methods.exchange.controlled_model import ControlledClusterModel, ControlledModel
from lcfl.methods.exchange.global_model import AdaptedModel, FullModel, GlobalReference, NoExchange, NormalisedModel
from lcfl.methods.exchange.partial_model import (
    AdaptedEmbedding,
    OwnLayers,
    PartialModel,
    SharedEmbedding,
    SharedLayers,
)
from lcfl.methods.exchange.personal_model import CentreAndEmbedding, ClusterReference, EnvelopeModel
from lcfl.methods.exchange.warmup import NamedLayers, Signature

__all__ = [
    "AdaptedEmbedding",
    "AdaptedModel",
    "AllCentres",
    "AttentiveReference",
    "CentreAndEmbedding",
    "ClusterChoice",
    "ClusterLosses",
    "ClusterModel",
    "ClusterReference",
    "ClusterUpdate",
    "ControlledClusterModel",
    "ControlledModel",
    "EnvelopeModel",
    "Exchange",
    "FullModel",
    "ModelKind",
    "NamedLayers",
    "NoExchange",
    "NormalisedModel",
    "OwnLayers",
    "PartialModel",
    "GlobalReference",
    "SharedEmbedding",
    "SharedLayers",
    "Signature",
]
