"""Trials of network, loss and metrics on a few samples, before training starts."""

import copy
import inspect
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lcfl.core import rng
from lcfl.core.validation import abbreviated
from lcfl.data.datamodule import FederatedDataModule
from lcfl.distributed.worker import blank_output
from lcfl.methods.local.batch_order import samples_per_epoch
from lcfl.methods.local.training import LocalUpdate
from lcfl.models.metrics import CLASS_LOSSES, ignore_index, reads_logits
from lcfl.models.module import FederatedModule

__all__ = ["check_batches", "check_network", "check_targets"]


@torch.no_grad()
def check_network(module: FederatedModule, data: FederatedDataModule) -> None:
    """Tries network, loss and metrics on two blank samples of the data set's shapes and types.

    Also warns about a buffer policy if the network has no buffers, and about scores that no label has.

    Raises:
        ValueError: if the network cannot take the inputs, or returns something other than outputs for each sample or
            fewer scores than there are classes, or if the loss or a metric cannot take outputs and targets or is not
            one number.
    """
    spec, dataset = data.dataset.spec, type(data.dataset).__name__
    network = type(module.network).__name__
    inputs, targets = spec.blank(2)
    if spec.num_classes is not None and targets.dim() == 1:
        targets[1] = spec.num_classes - 1  # some metrics need two classes
    module.eval()
    try:
        scores = module(inputs)
    except Exception as error:
        known = inspect.signature(type(module.network)).parameters
        usual = ("in_features",) if len(spec.shape) == 1 else ("in_channels", "image_size")
        sizes = [each for each in usual if each in known]
        types = (
            "" if spec.dtype.is_floating_point else " Or convert the inputs: .float() for numbers, .long() for tokens."
        )
        raise ValueError(
            f"model.network: {network} cannot take inputs of shape {spec.shape} and type {spec.dtype}, "
            f"which {dataset} provides ({type(error).__name__}: {error}). lcfl tries it with two made-up inputs, all "
            f"ones, which it must take, too. Set the network's arguments to fit{', e.g. ' * bool(sizes)}"
            f"{' and '.join(sizes)}.{types}"
        ) from error
    if not isinstance(scores, Tensor) or scores.dim() == 0 or len(scores) != 2:
        got = f"a tensor of shape {list(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise ValueError(
            f"model.network: {network} returns {got} for two samples; it must return one tensor [B, ...], such as "
            "class scores [B, classes]."
        )
    _check_forward(module, inputs)
    if spec.num_classes is not None:
        _check_scores(module, scores, spec.num_classes, f"{dataset} has {_classes(data)}")
    _check_loss(module.loss, scores, targets.to(scores.device))
    for name, metric in module.metrics.items():
        _check_metric(str(name), copy.deepcopy(metric), module.measured(scores), targets.to(scores.device))
    _warn_of_logits(module)
    if module.buffer_policy != "average" and module.buffer_layout is None:
        what = "no buffers" if module.frozen_layout is None else "no buffers outside of frozen layers"
        warnings.warn(f"model.buffer_policy: {network} has {what}, so it has no effect.", stacklevel=2)


def _check_forward(module: FederatedModule, inputs: Tensor) -> None:
    """Refuses a module whose outputs are not those of its network: every model that a run gives out is a network."""
    if type(module).forward is FederatedModule.forward:
        return
    with rng.seeded(0, "check forward"):
        own = module(inputs)
    failed: Exception | None = None
    try:
        with rng.seeded(0, "check forward"):
            plain = module.network(inputs)
        is_same = plain.shape == own.shape and torch.allclose(own, plain, rtol=0, atol=0, equal_nan=True)
    except Exception as error:  # of any kind, because it is the user's network, which may not take these inputs
        is_same, failed = False, error
    if not is_same:
        kind = type(module).__name__
        raise ValueError(
            f"model: {kind}.forward does not return what its network does. The models that a run returns, exports and "
            "predicts with are networks, without it. Put what it does into the network."
        ) from failed


def _classes(data: FederatedDataModule) -> str:
    """Returns the number of classes in words, with their names, which may show one that is misspelt."""
    classes = data.dataset.classes
    names = "" if classes is None else f" ({abbreviated(classes, 10)})"
    return f"{data.dataset.num_classes} classes{names}"


def _check_scores(module: FederatedModule, scores: Tensor, num_classes: int, has: str) -> None:
    """Refuses scores that are not one for each class, and warns of more."""
    network, loss = type(module.network), type(module.loss)
    kind, has_option = network.__name__, "num_classes" in inspect.signature(network).parameters
    change = f"set its num_classes to {num_classes}" if has_option else f"it must return {num_classes} for each sample"
    if loss.__module__.startswith("torch.nn.") and not isinstance(module.loss, CLASS_LOSSES):
        change += f". If they are numbers, as {loss.__name__} needs, read them as such (regression=true of Table)"
    if scores.dim() != 2 or scores.shape[1] < num_classes:
        raise ValueError(
            f"model.network: {kind} returns scores of shape {tuple(scores.shape[1:])}, but {has}: {change}."
        )
    if scores.shape[1] > num_classes:
        warnings.warn(
            f"model.network: {kind} returns {scores.shape[1]} scores, but {has}: {change}, unless the others are "
            "wanted.",
            stacklevel=3,
        )


def _check_loss(loss: nn.Module, scores: Tensor, targets: Tensor) -> None:
    """Refuses a loss that fails, broadcasts outputs and targets of different shapes, or is not one number."""
    kind, shapes = type(loss).__name__, f"outputs {list(scores.shape)} and targets {list(targets.shape)}"
    is_torchs = type(loss).__module__.startswith("torch.nn.")
    is_classes = isinstance(loss, CLASS_LOSSES)
    if is_torchs and not is_classes and targets.is_floating_point() and scores.shape != targets.shape:
        if scores.dim() == 2 and scores.shape == (*targets.shape, 1):
            raise ValueError(
                f"model.loss: {kind} got {shapes}; the network must return outputs in the shape of the targets: give "
                "the targets the shape [n, 1], or end the network with nn.Flatten(0)."
            )
        raise ValueError(  # most of torch's losses would broadcast them
            f"model.loss: {kind} got {shapes}; the network must return outputs in the shape of the targets: set its "
            "number of outputs."
        )
    if is_classes and scores.dim() > 1 and scores.shape[1] == 1:
        raise ValueError(
            f"model.loss: {kind} of a single score is always 0. For numbers, set model.loss to one such as MSELoss; "
            "for two classes, the network needs two scores."
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")  # torch's, before it broadcasts
            value = loss(scores, targets)
    except Exception as error:
        advice = "Use a loss that can, e.g. CrossEntropyLoss for classes or MSELoss for numbers, or wrap it."
        weight = getattr(loss, "weight", None)
        if is_classes and isinstance(weight, Tensor) and scores.dim() > 1 and len(weight) != scores.shape[1]:
            advice = f"Its weight has {len(weight)} numbers; it needs one for each of the {scores.shape[1]} scores."
        elif is_classes and targets.is_floating_point():
            advice = "Classes must be whole numbers: convert them with .long(), or use MSELoss for numbers."
        elif not targets.is_floating_point() and _succeeds(loss, scores, targets.float()):
            advice = "It takes the same targets as floats: convert them with .float()."
        raise ValueError(
            f"model.loss: {kind} cannot take {shapes} of {targets.dtype} ({type(error).__name__}: {error}). {advice}"
        ) from error
    has_same_size = targets.is_floating_point() and scores.numel() == targets.numel()
    if not is_torchs and has_same_size and scores.shape != targets.shape:
        warnings.warn(
            f"model.loss: {kind} got {shapes}. Unless it brings them to one shape, operations between them broadcast, "
            "and the loss is wrong.",
            stacklevel=3,
        )
    if getattr(loss, "reduction", None) == "sum":
        warnings.warn(
            f"model.loss: {kind} is a sum, which grows with the number of samples: losses of clients and batches of "
            "different sizes cannot be compared. Use reduction=mean, with a larger learning rate.",
            stacklevel=3,
        )
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"model.loss: {kind} gives {got} for two samples; it must give one number, e.g. with reduction=mean."
        )


def _warn_of_logits(module: FederatedModule) -> None:
    """Warns of metrics of probabilities beside others: lcfl gives all of them the same outputs."""
    reading = [str(name) for name, each in module.metrics.items() if reads_logits(each, module.loss)]
    if reading and len(reading) < len(module.metrics):
        warnings.warn(
            f"model.metrics: {', '.join(reading)} would read logits from 0 to 1 as probabilities, and the other "
            "metrics get logits, too. Give it outputs.sigmoid() in an update of your own.",
            stacklevel=3,
        )


def _succeeds(function: Callable[[Tensor, Tensor], object], scores: Tensor, targets: Tensor) -> bool:
    """Returns whether a loss or a metric takes outputs and targets."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(scores, targets)
    except Exception:
        return False
    return True


def _check_metric(name: str, metric: Metric, scores: Tensor, targets: Tensor) -> None:
    """Refuses a metric that fails on outputs and targets or gives something other than one number."""
    kind, shapes = type(metric).__name__, f"outputs {list(scores.shape)} and targets {list(targets.shape)}"
    if type(metric) is MulticlassAccuracy and targets.is_floating_point():  # it would compare numbers for equality
        raise ValueError(
            f"model.metrics.{name}: the accuracy needs targets that are classes, and these are real numbers: set "
            "model.report to loss, or to another one of model.metrics."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about labels that are missing among two samples
            value = metric(scores, targets)
    except Exception as error:
        numbers = [each for each in ("num_classes", "num_labels") if each in inspect.signature(type(metric)).parameters]
        is_wrong = numbers and scores.dim() > 1 and getattr(metric, numbers[0], None) != scores.shape[1]
        number = f", e.g. {numbers[0]} to {scores.shape[1]}" if is_wrong else ""
        advice = f"Set its arguments to fit{number}, or report another metric (model.report)."
        if scores.dim() > 1 and scores.shape[1] == 2 and _succeeds(metric, scores[:, 1], targets):
            advice = "It takes one score for each sample: in its update, give it outputs.softmax(-1)[:, 1]."
        elif targets.is_floating_point() and _succeeds(metric, scores, targets.long()):
            advice = (
                "It takes the same targets as whole numbers: set its validate_args to false, or convert them in its "
                "update."
            )
        raise ValueError(
            f"model.metrics.{name}: {kind} cannot take {shapes} of {targets.dtype} ({type(error).__name__}: {error}). "
            f"{advice}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(
            f"model.metrics.{name}: {kind} gives {got}; a metric must be one number per client. Average it over the "
            "classes, e.g. with average=macro."
        )


def check_batches(module: FederatedModule, data: FederatedDataModule, local_update: LocalUpdate | None = None) -> None:
    """Refuses batches of one sample if the module cannot train on them, as with batch normalisation.

    Otherwise a batch of one sample would end the run in the round in which it comes up.

    Args:
        module: the module, of which a copy tries `training_step` on blank inputs.
        data: the data module after its setup, because the clients' sizes decide.
        local_update: the method's local update, which may draw its batches from a part of a client's samples.

    Raises:
        ValueError: if some client's pass ends with one sample and the module cannot take it; names the first client.
    """
    sizes, batch_size = data.population.sizes.tolist(), data.batch_size

    def ends_with_one(size: int) -> bool:
        drawn = (size,) if local_update is None else local_update.sizes_drawn(size)
        return any((samples_per_epoch(each, batch_size, data.drop_last) - 1) % batch_size == 0 for each in drawn)

    single = [client for client, size in enumerate(sizes) if ends_with_one(size)]
    error = _step_error(module, data, 1) if single else None
    if error is None or _step_error(module, data, 2) is not None:  # a step that always fails reports the reason itself
        return
    cures = []
    if batch_size == 1:
        cures.append("set data.batch_size to 2 or more")
    elif any(sizes[client] > 1 for client in single):
        cures.append("set data.drop_last=true or another data.batch_size")
    if any(sizes[client] == 1 for client in single):
        cures.append("a client with one training sample needs a data.partition with larger clients")
    first, network = single[0], type(module.network).__name__
    name = data.population.called(first)
    raise ValueError(
        f"data.batch_size: got {batch_size}, which leaves {len(single)} of {len(sizes)} clients a batch of one sample "
        f"(the first is client {name} with {sizes[first]} training samples), and {network} "
        f"cannot train on that ({error}): {'; '.join(cures)}."
    )


@torch.no_grad()
def check_targets(module: FederatedModule, data: FederatedDataModule) -> None:
    """Checks that the loss takes the training targets of every client.

    Of a loss of classes, it looks for tokens and masks without a score. Of any other loss, and if targets are read
    with their inputs, it tries the first sample of each client. Labels are in range already.

    Args:
        module: the network, whose output for a blank sample has the right shape, and the loss.
        data: the data module after its setup.

    Raises:
        ValueError: if the loss refuses a client's targets; names the client.
    """
    if data.samples.labels is not None:
        return
    loss, ignored = module.loss, ignore_index(module.loss)
    outputs = blank_output(module, data.dataset.spec)
    for client, indices in enumerate(data.population.train):
        own, where = data.seen_by(client), f"client {data.population.called(client)}"
        with rng.seeded(0, "check targets", client):
            targets = own.targets(indices if own.has_cheap_targets else indices[:1])
        if isinstance(loss, CLASS_LOSSES):
            beyond = (targets != ignored) & ((targets < 0) | (targets >= outputs.shape[1]))
            if not targets.is_floating_point() and beyond.any():
                raise ValueError(
                    f"model.loss: {type(loss).__name__} refuses the target {int(targets[beyond][0])} of {where}: the "
                    f"network has scores for the {outputs.shape[1]} classes from 0 on. Give it more scores, or ignore "
                    "this target (ignore_index)."
                )
            continue
        counts_all = "acc" in module.metrics and ignored is None and not targets.is_floating_point()
        if counts_all and ((targets < 0) | (targets >= outputs.shape[1])).any():
            raise ValueError(
                f"model.report: acc would count targets of {where} that are no class of the {outputs.shape[1]} scores. "
                f"If {type(loss).__name__} ignores them, give it an attribute ignore_index with their number."
            )
        try:
            loss(outputs, targets[:1])
        except Exception as error:
            raise ValueError(
                f"model.loss: {type(loss).__name__} refuses the first target of {where} ({type(error).__name__}: "
                f"{error})."
            ) from error


def _step_error(module: FederatedModule, data: FederatedDataModule, number: int) -> Exception | None:
    """Returns the exception of a training step on `number` blank inputs, or None; the module does not change."""
    trial = module.replica().train()
    try:
        with rng.seeded(0, "check batches"), trial.collecting():
            trial.training_step(data.dataset.spec.blank(number), 0)
    except Exception as error:
        return error
    return None
