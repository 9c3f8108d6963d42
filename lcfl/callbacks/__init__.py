"""Callbacks that watch or end a federation: checkpoints, progress, figures, early stopping."""

from lcfl.callbacks.checkpoint import Checkpoint
from lcfl.callbacks.early_stopping import EarlyStopping
from lcfl.callbacks.label_similarity import LabelSimilarity
from lcfl.callbacks.monitor import Monitor
from lcfl.callbacks.progress import Progress

__all__ = ["Checkpoint", "EarlyStopping", "LabelSimilarity", "Monitor", "Progress"]
