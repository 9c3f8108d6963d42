"""The client's part of a round: what a client starts from and minimises, and the engine that computes it."""

from lcfl.methods.local.calibrated import CalibratedTraining
from lcfl.methods.local.corrected import ControlledTraining, DynamicTraining
from lcfl.methods.local.ditto import DittoTraining
from lcfl.methods.local.engine import Engine, Gradient
from lcfl.methods.local.envelope import EnvelopeTraining
from lcfl.methods.local.initialised import AdaptiveInitialisation, InitialisedTraining
from lcfl.methods.local.least_loss import LeastLoss, LeastLossTraining, LossVector
from lcfl.methods.local.meta import GradientStep, MetaTraining
from lcfl.methods.local.mixture import MixtureTraining
from lcfl.methods.local.normalised import NormalisedTraining
from lcfl.methods.local.partial import AlternatingTraining, FineTunedTraining, PartTraining
from lcfl.methods.local.signature import PixelSignature
from lcfl.methods.local.training import LocalOutput, LocalTraining, LocalUpdate
from lcfl.models.pulls import Pulls

__all__ = [
    "AdaptiveInitialisation",
    "AlternatingTraining",
    "CalibratedTraining",
    "ControlledTraining",
    "DittoTraining",
    "DynamicTraining",
    "Engine",
    "EnvelopeTraining",
    "FineTunedTraining",
    "Gradient",
    "GradientStep",
    "InitialisedTraining",
    "LeastLoss",
    "LeastLossTraining",
    "LocalTraining",
    "LocalUpdate",
    "LossVector",
    "MetaTraining",
    "MixtureTraining",
    "NormalisedTraining",
    "LocalOutput",
    "PartTraining",
    "PixelSignature",
    "Pulls",
]
