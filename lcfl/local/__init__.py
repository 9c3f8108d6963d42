"""The client's side of a round: what it starts from and minimises, and the engine that runs it."""

from lcfl.local.update import Engine, Gradient, LocalTraining, LocalUpdate, Trained

__all__ = ["Engine", "Gradient", "LocalTraining", "LocalUpdate", "Trained"]
