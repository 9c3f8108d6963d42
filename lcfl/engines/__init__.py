"""Engines: they carry out the clients' local runs on a rank. A method does not know which engine it uses."""

from lcfl.engines.compiled import CompiledEngine
from lcfl.engines.selection import ChosenEngine, EngineName, choose_engine, make_engine
from lcfl.engines.sequential import SequentialEngine
from lcfl.engines.stacked import StackedEngine

__all__ = [
    "ChosenEngine",
    "CompiledEngine",
    "EngineName",
    "SequentialEngine",
    "StackedEngine",
    "choose_engine",
    "make_engine",
]
