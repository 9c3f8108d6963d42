"""Transforms of uploads on their way to the server: compression, clipping and noise."""

from lcfl.methods.exchange.transforms.base import UploadTransform
from lcfl.methods.exchange.transforms.low_rank import LowRankCompression
from lcfl.methods.exchange.transforms.privacy import GaussianNoise, PrivacyGuarantee

__all__ = ["GaussianNoise", "PrivacyGuarantee", "LowRankCompression", "UploadTransform"]
