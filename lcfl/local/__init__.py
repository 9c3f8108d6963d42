"""The client's side of a round: what it starts from and minimises, and the engine that runs it."""

from lcfl.local.choice import LeastLoss, LeastLossTraining
from lcfl.local.engine import Engine, Gradient
from lcfl.local.envelope import EnvelopeTraining
from lcfl.local.meta import GradientStep, MetaTraining
from lcfl.local.normalised import NormalisedTraining
from lcfl.local.signature import PixelSignature
from lcfl.local.update import LocalTraining, LocalUpdate, Trained

__all__ = [
    "Engine",
    "EnvelopeTraining",
    "Gradient",
    "GradientStep",
    "LeastLoss",
    "LeastLossTraining",
    "LocalTraining",
    "LocalUpdate",
    "MetaTraining",
    "NormalisedTraining",
    "PixelSignature",
    "Trained",
]
