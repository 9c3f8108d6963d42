"""What an upload goes through on its way to the server: compression, clipping and noise."""

from lcfl.upload.base import Releases, UploadTransform
from lcfl.upload.lowrank import LowRankCompression
from lcfl.upload.privacy import GaussianNoise, Guarantee

__all__ = ["GaussianNoise", "Guarantee", "LowRankCompression", "Releases", "UploadTransform"]
