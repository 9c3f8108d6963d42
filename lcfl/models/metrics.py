"""The metrics of a module, and which of them is reported."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lcfl.core.metric_names import SUMMARIES, Reported
from lcfl.core.validation import check_instance

__all__ = [
    "CLASS_LOSSES",
    "accuracy",
    "counted_targets",
    "ignore_index",
    "keep_apart",
    "metric_collection",
    "reads_logits",
    "reported_metric",
    "weight_in_loss",
]

CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)  # their targets are numbers of classes


def metric_collection(metrics: Mapping[str, Metric], report: str, loss: nn.Module) -> MetricCollection:
    """Returns metrics by name, with the accuracy ``acc`` if it is reported.

    Targets that the loss ignores do not count in the accuracy.

    Raises:
        TypeError: for anything other than metrics by name.
        ValueError: for a name that lcfl uses itself.
    """
    if not isinstance(metrics, Mapping | MetricCollection):
        raise TypeError(
            f"model.metrics: got {type(metrics).__name__}; it must be a dict of metrics by name, e.g. "
            "{'f1': MulticlassF1Score(10)}."
        )
    for name, metric in metrics.items():
        check_instance(f"model.metrics.{name}", metric, Metric)
        if "/" in name or name == "loss" or name.endswith(SUMMARIES):
            raise ValueError(
                f"model.metrics: got the name {name!r}; a name has no slash, is not loss, and does not end in "
                f"{', '.join(SUMMARIES)}, which are the names of summaries over clients. Rename this metric."
            )
        if not name or "." in name or hasattr(MetricCollection([]), name):
            raise ValueError(
                f"model.metrics: got the name {name!r}; torchmetrics allows no empty name, no dot and no name of an "
                "attribute of its MetricCollection. Rename this metric."
            )
    default = MulticlassAccuracy(average="micro", ignore_index=ignore_index(loss), validate_args=False)
    # Groups of metrics that share their sums would be those that agree on the first client that is measured.
    return MetricCollection({**({"acc": default} if report == "acc" else {}), **metrics}, compute_groups=False)


def reads_logits(metric: Metric, loss: nn.Module) -> bool:
    """Returns whether a metric would read the logits of a loss on logits as probabilities if all lie from 0 to 1.

    The binary and multilabel metrics of torchmetrics do. They apply the sigmoid only if a value lies elsewhere.
    """
    kinds = [each for each in type(metric).__mro__ if each.__module__.startswith("torchmetrics.classification.")]
    has_own_update = not type(metric).update.__module__.startswith("torchmetrics.")
    is_of_probabilities = any(each.__name__.startswith(("Binary", "Multilabel")) for each in kinds)
    return isinstance(loss, nn.BCEWithLogitsLoss) and is_of_probabilities and not has_own_update


def accuracy(scores: Tensor, targets: Tensor, loss: nn.Module) -> float:
    """Returns ``acc`` of a single batch without the bookkeeping of a metric; 0 if no target counts.

    Args:
        scores: ``[n, C, ...]``.
        targets: ``[n, ...]``.
        loss: says which targets do not count.
    """
    right, counted = scores.argmax(dim=1) == targets, targets.numel()
    if (ignored := ignore_index(loss)) is not None:
        counts = targets != ignored
        right, counted = right & counts, int(counts.sum())
    return float(torch.tensor(int(right.sum())) / torch.tensor(max(1, counted)))  # in float32, as torchmetrics


def keep_apart(metrics: MetricCollection) -> None:
    """Keeps metrics from being summed over ranks, which evaluate different clients."""
    for metric in metrics.values():
        del metric.distributed_available_fn  # a metric that was given a module for it would refuse a function
        metric.distributed_available_fn = _never


def reported_metric(name: str, larger_is_better: bool | None, directions: Mapping[str, bool | None]) -> Reported:
    """Returns the reported metric.

    Args:
        name: its name.
        larger_is_better: whether larger values are better; None for what is known.
        directions: what is known of every metric that is measured.

    Raises:
        ValueError: if it is not measured, or if nobody says whether larger values are better.
    """
    if name not in directions:
        raise ValueError(
            f"model.report: got {name}, which is not measured; allowed are acc, loss and the names in model.metrics"
            f"{', '.join(['', *(each for each in directions if each != 'loss')])}."
        )
    if larger_is_better is None:
        larger_is_better = directions[name]
    if larger_is_better is None:
        raise ValueError(
            f"model.larger_is_better: the metric {name} does not say whether larger values are better; set "
            "model.larger_is_better to true or false."
        )
    return Reported(name, larger_is_better)


def ignore_index(loss: nn.Module) -> int | None:
    """Returns the number that a loss of classes ignores as a target; None if it has none."""
    number = getattr(loss, "ignore_index", None)
    return number if isinstance(number, int) else None


def _never() -> bool:
    return False


def counted_targets(loss: nn.Module, targets: Tensor) -> Tensor:
    """Returns the targets that a loss does not ignore."""
    ignored = ignore_index(loss)
    return targets if ignored is None or targets.is_floating_point() else targets[targets != ignored]


def weight_in_loss(loss: nn.Module, targets: Tensor) -> float:
    """Returns the weight of a batch in the mean of a loss: its samples or, of classes, those that the loss counts.

    The weights of classes count only for the losses of torch: a loss of the user's own may call anything ``weight``.
    """
    if ignore_index(loss) is None or targets.is_floating_point():
        return len(targets)
    counted = counted_targets(loss, targets)
    weight = loss.weight if isinstance(loss, CLASS_LOSSES) else None
    return counted.numel() if weight is None else float(weight[counted].sum())
