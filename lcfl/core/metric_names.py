"""The names of metrics of evaluations, which have the form ``<stage>/<protocol>/<model>/<metric>``."""

from collections.abc import Iterable

__all__ = ["SUMMARIES", "added_metrics"]

SUMMARIES = ("_weighted", "_std", "_worst10")  # endings of the summaries over clients other than the mean


def added_metrics(names: Iterable[str]) -> list[str]:
    """Returns the metrics that the user added to loss and accuracy (``model.metrics``).

    Args:
        names: full names, such as ``test/own_split/global/f1``.
    """
    parts = [name.split("/") for name in names if not name.endswith(SUMMARIES)]
    last = [each[3] for each in parts if len(each) == 4 and each[0] in ("val", "test")]
    return list(dict.fromkeys(name for name in last if name not in ("loss", "acc")))
