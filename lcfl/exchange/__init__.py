"""What goes down to a client and what comes up from it: one class per kind of exchange."""

from lcfl.exchange.base import Exchange, ModelKind
from lcfl.exchange.clusters import AllCentres, Choice, ClusterModel, ClusterUpdate
from lcfl.exchange.one_model import AdaptedModel, FullModel, NoExchange, NormalisedModel, Reference
from lcfl.exchange.opening import NamedLayers, Signature
from lcfl.exchange.partial import PartialModel, SharedEmbedding, SharedLayers
from lcfl.exchange.personal import CentreAndEmbedding, ClusterReference, EnvelopeModel

__all__ = [
    "AdaptedModel",
    "AllCentres",
    "CentreAndEmbedding",
    "Choice",
    "ClusterModel",
    "ClusterReference",
    "ClusterUpdate",
    "EnvelopeModel",
    "Exchange",
    "FullModel",
    "ModelKind",
    "NamedLayers",
    "NoExchange",
    "NormalisedModel",
    "PartialModel",
    "Reference",
    "SharedEmbedding",
    "SharedLayers",
    "Signature",
]
