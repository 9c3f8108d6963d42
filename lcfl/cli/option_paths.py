"""Paths of options, such as ``model.optimizer.lr``."""

__all__ = ["without_init_args"]


def without_init_args(option: str) -> str:
    """Returns the path of an option without ``init_args``, which may be left out."""
    return option.replace(".init_args", "")
