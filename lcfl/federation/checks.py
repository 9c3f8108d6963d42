"""Checks for errors and for settings without an effect, before data are loaded or before training starts."""

import copy
import warnings
from collections.abc import Sequence
from math import isfinite
from numbers import Integral

import torch
from lightning.pytorch import Callback as TrainerCallback
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lcfl.core import rng
from lcfl.core.callback import Callback, check_hooks
from lcfl.core.validation import check_instance
from lcfl.data.datamodule import FederatedDataModule
from lcfl.methods.exchange import Exchange
from lcfl.methods.local.batch_order import samples_per_epoch
from lcfl.methods.local.envelope import EnvelopeTraining
from lcfl.methods.local.meta import MetaTraining
from lcfl.methods.local.training import LocalTraining
from lcfl.methods.method import Method
from lcfl.models.module import CLASS_LOSSES, FederatedModule, ignore_index

__all__ = [
    "check_batches",
    "check_callbacks",
    "check_method",
    "check_network",
    "check_optimizer",
    "check_parts",
    "check_targets",
    "number_of_clients",
]

# Lightning's Trainer calls these hooks of a module for a step or a metric; a federation does not call them.
TRAINER_HOOKS = ["validation_step", "test_step", "configure_gradient_clipping", "backward", "lr_scheduler_step"]
TRAINER_HOOKS += ["optimizer_step", "optimizer_zero_grad", "on_before_optimizer_step", "on_before_zero_grad"]
TRAINER_HOOKS += ["on_before_backward", "on_after_backward", "on_train_batch_start", "on_train_batch_end"]
TRAINER_HOOKS += ["on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"]


def number_of_clients(option: str, wanted: int | float, num_clients: int, num_newcomers: int = 0) -> int:
    """Returns max(1, floor(fraction * n)) for a fraction of the n clients that are not newcomers, or the count itself.

    Args:
        option: option of the trainer, for errors: ``clients_per_round`` (|S_t|) or ``evaluate_clients``.
        wanted: a fraction (a float) or a count.
        num_clients: N.
        num_newcomers: N - n.

    Raises:
        ValueError: for a fraction outside (0, 1] or a count outside 1..n.
    """
    kept_out = f" without {num_newcomers} newcomers" if num_newcomers else ""
    most = num_clients - num_newcomers
    if not isinstance(wanted, Integral):
        if not 0 < wanted <= 1:
            raise ValueError(
                f"trainer.{option}: got the fraction {wanted}; allowed are fractions in (0, 1] and counts "
                f"from 1 to data.num_clients={num_clients}{kept_out}."
            )
        return max(1, int(wanted * most + 1e-9))
    if not 1 <= wanted <= most:
        raise ValueError(
            f"trainer.{option}: got {wanted} for data.num_clients={num_clients}{kept_out}; allowed are counts "
            f"from 1 to {most} and fractions in (0, 1]."
        )
    return int(wanted)


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Refuses callbacks of ``lightning.Trainer``, other objects, and misspelt hooks.

    Nothing would call a callback of ``lightning.Trainer``.
    """
    for callback in callbacks:
        if isinstance(callback, TrainerCallback):
            raise ValueError(
                f"trainer.callbacks: {type(callback).__name__} is a callback of lightning.Trainer and would never be "
                "called; use those of lcfl.callbacks (Checkpoint, EarlyStopping, Monitor, Progress) or derive from "
                "lcfl.Callback."
            )
        check_instance("trainer.callbacks", callback, Callback)
    check_hooks(callbacks)


def check_parts(model: object, datamodule: object, method: object) -> None:
    """Refuses objects of the wrong class as model, data module or method, which Python accepts.

    Raises:
        TypeError: for the first object of another class.
    """
    check_instance("model", model, FederatedModule)
    check_instance("datamodule", datamodule, FederatedDataModule)
    check_instance("method", method, Method)


def check_method(method: Method, module: FederatedModule, num_clients: int) -> None:
    """Refuses parts that cannot work together and warns about settings without an effect.

    Raises:
        ValueError: if a part cannot work with this number of clients or with the exchange, or if the module makes
            something other than one optimizer with finite settings.
    """
    check_hooks(method.clustering)
    for clustering in method.clustering:
        clustering.check(num_clients)
        clustering.check_layout(module.layout)
    method.exchange.check(module.layout)
    method.local_update.check(module)
    _check_start(method)
    _warn_of_hooks(module)
    pulls = (*method.exchange.sends, *method.local_update.adds)
    name = type(method.exchange).__name__
    for weight, symbol, needed in (("cluster_weight", "mu", "centre"), ("global_weight", "lambda", "embedding")):
        if getattr(module, weight) > 0 and needed not in pulls:
            warnings.warn(
                f"model.{weight} ({symbol}) = {getattr(module, weight)} has no effect: {name} sends no {needed}.",
                stacklevel=2,
            )
    _warn_of_large_steps(module, pulls)


def _check_start(method: Method) -> None:
    """Refuses a local update without a model to start from; warns about a start that another one replaces."""
    local_update, exchange, name = method.local_update, method.exchange, type(method.exchange).__name__
    if not isinstance(local_update, LocalTraining | MetaTraining | EnvelopeTraining) or local_update.reads:
        return
    start = local_update.start
    # User-defined parts may find a model where the parts of lcfl cannot.
    is_ours = type(local_update).__module__.startswith("lcfl.") and type(exchange).at_client is Exchange.at_client
    if "model" in exchange.sends:
        if start != "own":
            warnings.warn(
                f"method.local_update: start={start} has no effect: {name} sends a model, and local runs start from "
                "it.",
                stacklevel=3,
            )
    elif start != "own" and start not in exchange.sends:
        raise ValueError(
            f"method.local_update: got start={start}, but {name} sends no {start}; use start=own or an exchange that "
            "sends it, e.g. CentreAndEmbedding."
        )
    elif start != "centre" and not exchange.keeps_model and is_ours:
        has_choice = "centre" in exchange.sends and isinstance(local_update, LocalTraining)
        raise ValueError(
            f"method.local_update: {type(local_update).__name__} starts from the client's own model, but with "
            f"{name} clients keep no model and receive none to start from; use "
            f"{'start=centre or ' if has_choice else ''}an exchange that sends a model or keeps it, e.g. FullModel."
        )


def _warn_of_hooks(module: FederatedModule) -> None:
    """Warns about hooks that a subclass defines for Lightning's Trainer.

    They are not an error, because the module may also train under that Trainer.
    """
    kind = type(module)
    unused = [name for name in TRAINER_HOOKS if getattr(kind, name) is not getattr(FederatedModule, name)]
    if unused:
        warnings.warn(
            f"model: {kind.__name__} defines {', '.join(unused)}, which lightning.Trainer calls and a federation does "
            "not. Put changes to a step into training_step or into the optimizer that configure_optimizers returns, "
            "measurements into model.metrics, and data into the data module.",
            stacklevel=3,
        )


def _warn_of_large_steps(module: FederatedModule, pulls: tuple[str, ...]) -> None:
    pull = module.cluster_weight * ("centre" in pulls) + module.global_weight * ("embedding" in pulls)
    optimizer = module.configure_optimizers()
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers: got {type(optimizer).__name__}; a local run needs one "
            "torch.optim.Optimizer."
        )
    for name, value in ((name, value) for group in optimizer.param_groups for name, value in group.items()):
        numbers = value if isinstance(value, tuple | list) else [value]
        if name != "params" and not all(isfinite(each) for each in numbers if isinstance(each, int | float | Tensor)):
            raise ValueError(
                f"model.optimizer: {type(optimizer).__name__} got {name}={value}; it must be a finite number."
            )
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    if rates and max(rates) * pull >= 2:
        warnings.warn(
            f"the learning rate {max(rates)} times model.cluster_weight + model.global_weight = {pull} is >= 2: the "
            "pull alone makes local runs diverge. Keep the product at 1 or below.",
            stacklevel=2,
        )


def check_optimizer(module: FederatedModule) -> None:
    """Tries one step of the optimizer on the CPU, with gradients of zero; the network does not change.

    Raises:
        ValueError: if the optimizer cannot take a step.
    """
    parameters = list(module.network.parameters())
    values = [parameter.detach().clone() for parameter in parameters]
    optimizer = module.configure_optimizers()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        with rng.seeded(0, "check optimizer"):
            optimizer.step()
    except Exception as error:
        raise ValueError(
            f"model.optimizer: {type(optimizer).__name__} cannot take a step on a CPU "
            f"({type(error).__name__}: {error}). Change its arguments, or use another one."
        ) from error
    finally:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.detach().copy_(value)
            parameter.grad = None


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
    module.eval()
    try:
        scores = module(inputs)
    except Exception as error:
        raise ValueError(
            f"model.network: {network} cannot take inputs of shape {spec.shape} and type {spec.dtype}, "
            f"which {dataset} provides ({type(error).__name__}: {error}). Set the network's "
            "arguments to fit, e.g. in_channels and image_size."
        ) from error
    if not isinstance(scores, Tensor) or scores.dim() == 0 or len(scores) != 2:
        got = f"a tensor of shape {list(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise ValueError(
            f"model.network: {network} returns {got} for two samples; it must return one tensor [B, ...], such as "
            "class scores [B, classes]."
        )
    if spec.num_classes is not None:
        _check_scores(network, scores, spec.num_classes, dataset)
    _check_loss(module.loss, scores, targets.to(scores.device))
    for name, metric in module.metrics.items():
        _check_metric(str(name), copy.deepcopy(metric), scores, targets.to(scores.device))
    if module.buffer_policy != "average" and module.buffer_layout is None:
        warnings.warn(f"model.buffer_policy: {network} has no buffers, so it has no effect.", stacklevel=2)


def _check_scores(network: str, scores: Tensor, num_classes: int, dataset: str) -> None:
    """Refuses scores that are not one for each class, and warns of more."""
    if scores.dim() != 2 or scores.shape[1] < num_classes:
        raise ValueError(
            f"model.network: {network} returns scores of shape {tuple(scores.shape[1:])}, but "
            f"{dataset} has {num_classes} classes: set its num_classes to {num_classes}."
        )
    if scores.shape[1] > num_classes:
        warnings.warn(
            f"model.network: {network} returns {scores.shape[1]} scores, but {dataset} has "
            f"{num_classes} classes: set its num_classes to {num_classes}, unless the others are wanted.",
            stacklevel=3,
        )


def _check_loss(loss: nn.Module, scores: Tensor, targets: Tensor) -> None:
    """Refuses a loss that fails, broadcasts outputs and targets of different shapes, or is not one number."""
    kind, shapes = type(loss).__name__, f"outputs {list(scores.shape)} and targets {list(targets.shape)}"
    is_torchs = type(loss).__module__.startswith("torch.nn.")
    is_classes = isinstance(loss, CLASS_LOSSES)
    if is_torchs and not is_classes and targets.is_floating_point() and scores.shape != targets.shape:
        raise ValueError(  # most of torch's losses would broadcast them
            f"model.loss: {kind} got {shapes}; the network must return outputs in the shape of the targets: set its "
            "number of outputs."
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")  # torch's, before it broadcasts
            value = loss(scores, targets)
    except Exception as error:
        advice = "Use a loss that can, e.g. CrossEntropyLoss for classes or MSELoss for numbers, or wrap it."
        if is_classes and targets.is_floating_point():
            advice = "Classes must be whole numbers: convert them with .long(), or use MSELoss for numbers."
        raise ValueError(
            f"model.loss: {kind} cannot take {shapes} of {targets.dtype} ({type(error).__name__}: {error}). {advice}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"model.loss: {kind} gives {got} for two samples; it must give one number, e.g. with reduction=mean."
        )


def _check_metric(name: str, metric: Metric, scores: Tensor, targets: Tensor) -> None:
    """Refuses a metric that fails on outputs and targets or gives something other than one number."""
    kind, shapes = type(metric).__name__, f"outputs {list(scores.shape)} and targets {list(targets.shape)}"
    if isinstance(metric, MulticlassAccuracy) and targets.is_floating_point():  # it would compare numbers for equality
        raise ValueError(
            f"model.metrics.{name}: the accuracy needs targets that are classes, and these are real numbers: set "
            "model.report to loss, or to another one of model.metrics."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about labels that are missing among two samples
            value = metric(scores, targets)
    except Exception as error:
        classes = f", e.g. num_classes to {scores.shape[1]}" if scores.dim() > 1 else ""
        raise ValueError(
            f"model.metrics.{name}: {kind} cannot take {shapes} ({type(error).__name__}: {error}). Set its arguments "
            f"to fit{classes}, or report another metric (model.report)."
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(
            f"model.metrics.{name}: {kind} gives {got}; a metric must be one number per client. Average it over the "
            "classes, e.g. with average=macro."
        )


def check_batches(module: FederatedModule, data: FederatedDataModule) -> None:
    """Refuses batches of one sample if the module cannot train on them, as with batch normalisation.

    Otherwise a batch of one sample would end the run in the round in which it comes up.

    Args:
        module: the module, of which a copy tries `training_step` on blank inputs.
        data: the data module after its setup, because the clients' sizes decide.

    Raises:
        ValueError: if some client's pass ends with one sample and the module cannot take it; names the first client.
    """
    sizes, batch_size = data.population.sizes.tolist(), data.batch_size
    lengths = [samples_per_epoch(size, batch_size, data.drop_last) for size in sizes]
    single = [client for client, length in enumerate(lengths) if (length - 1) % batch_size == 0]
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
    with rng.isolated():
        outputs = copy.deepcopy(module).cpu().eval()(data.dataset.spec.blank(1)[0])
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
        try:
            loss(outputs, targets[:1])
        except Exception as error:
            raise ValueError(
                f"model.loss: {type(loss).__name__} refuses the first target of {where} ({type(error).__name__}: "
                f"{error})."
            ) from error


def _step_error(module: FederatedModule, data: FederatedDataModule, number: int) -> Exception | None:
    """Returns the exception of a training step on `number` blank inputs, or None; the module does not change."""
    trial = copy.deepcopy(module).train()
    try:
        with rng.seeded(0, "check batches"), trial.collecting():
            trial.training_step(data.dataset.spec.blank(number), 0)
    except Exception as error:
        return error
    return None
