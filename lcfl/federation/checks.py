"""What can be known to be wrong, or to have no effect, before any data is loaded or before training starts."""

import copy
import warnings
from collections.abc import Sequence
from numbers import Integral

import torch
from lightning.pytorch import Callback as TrainerCallback
from torch import Tensor
from torch.optim import Optimizer

from lcfl.core import rng
from lcfl.core.callback import Callback, check_hooks
from lcfl.core.validation import check_instance
from lcfl.data.datamodule import FederatedDataModule
from lcfl.methods.exchange import Exchange
from lcfl.methods.local.batch_order import pass_length
from lcfl.methods.local.envelope import EnvelopeTraining
from lcfl.methods.local.meta import MetaTraining
from lcfl.methods.local.training import LocalTraining
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule

__all__ = ["check_batches", "check_callbacks", "check_method", "check_network", "check_parts", "number_of_clients"]

# What Lightning's Trainer calls on a module for a step or a metric, and a federation does not.
TRAINER_HOOKS = ["validation_step", "test_step", "configure_gradient_clipping", "backward", "lr_scheduler_step"]
TRAINER_HOOKS += ["optimizer_step", "optimizer_zero_grad", "on_before_optimizer_step", "on_before_zero_grad"]
TRAINER_HOOKS += ["on_before_backward", "on_after_backward", "on_train_batch_start", "on_train_batch_end"]
TRAINER_HOOKS += ["on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"]


def number_of_clients(option: str, wanted: int | float, num_clients: int, num_newcomers: int = 0) -> int:
    """max(1, floor(fraction * n)) for a fraction of the n clients that are no newcomers, or the count itself.

    Args:
        option: of the trainer, for errors: ``clients_per_round`` (|S_t|) or ``evaluate_clients``.
        wanted: a fraction, a float, or a count.
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
    """Refuses callbacks of ``lightning.Trainer``, which nothing would call, other objects, and misspelt hooks."""
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
    """Refuses other objects than those that a run is made of, as Python passes them on.

    Raises:
        TypeError: for the first one of another class.
    """
    check_instance("model", model, FederatedModule)
    check_instance("datamodule", datamodule, FederatedDataModule)
    check_instance("method", method, Method)


def check_method(method: Method, module: FederatedModule, num_clients: int) -> None:
    """Refuses parts that cannot work together and warns of settings without an effect.

    Raises:
        ValueError: if a part cannot work with so many clients or with the exchange, or the module makes
            something else than one optimizer.
    """
    check_hooks(method.clustering)
    for clustering in method.clustering:
        clustering.check(num_clients)
        clustering.check_layout(module.layout)
    method.exchange.check(module.layout)
    method.local_update.check(module)
    _check_start(method)
    _warn_of_hooks(module)
    sends = method.exchange.sends
    name = type(method.exchange).__name__
    for weight, symbol, needed in (("cluster_weight", "mu", "centre"), ("global_weight", "lambda", "embedding")):
        if getattr(module, weight) > 0 and needed not in sends:
            warnings.warn(
                f"model.{weight} ({symbol}) = {getattr(module, weight)} has no effect: {name} sends no {needed}.",
                stacklevel=2,
            )
    _warn_of_large_steps(module, sends)


def _check_start(method: Method) -> None:
    """Refuses a local update that would find no model to start from; warns of a start that another one replaces."""
    local_update, exchange, name = method.local_update, method.exchange, type(method.exchange).__name__
    if not isinstance(local_update, LocalTraining | MetaTraining | EnvelopeTraining) or local_update.reads:
        return
    start = local_update.start
    # What is of one's own may find a model where lcfl's would not.
    is_ours = type(local_update).__module__.startswith("lcfl.") and type(exchange).at_client is Exchange.at_client
    if "model" in exchange.sends:
        if start != "own":
            warnings.warn(
                f"method.local_update: start={start} has no effect: {name} sends a model, and local runs start from "
                "that.",
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
            f"{name} clients keep none and are sent no other to start from; use "
            f"{'start=centre or ' if has_choice else ''}an exchange that sends a model or keeps it, e.g. FullModel."
        )


def _warn_of_hooks(module: FederatedModule) -> None:
    """Warns of what a subclass defines for Lightning's Trainer, under which it may train as well."""
    kind = type(module)
    unused = [name for name in TRAINER_HOOKS if getattr(kind, name) is not getattr(FederatedModule, name)]
    if unused:
        warnings.warn(
            f"model: {kind.__name__} defines {', '.join(unused)}, which lightning.Trainer calls and a federation does "
            "not. What changes a step belongs into training_step or the optimizer that configure_optimizers makes, "
            "what is measured into model.metrics, and data into the data module.",
            stacklevel=3,
        )


def _warn_of_large_steps(module: FederatedModule, sends: tuple[str, ...]) -> None:
    pull = module.cluster_weight * ("centre" in sends) + module.global_weight * ("embedding" in sends)
    optimizer = module.configure_optimizers()
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers: got {type(optimizer).__name__}; a local run needs one "
            "torch.optim.Optimizer."
        )
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    if rates and max(rates) * pull >= 2:
        warnings.warn(
            f"the learning rate {max(rates)} times model.cluster_weight + model.global_weight = {pull} is >= 2: the "
            "pull alone makes local runs diverge. Keep the product at 1 or below.",
            stacklevel=2,
        )


@torch.no_grad()
def check_network(module: FederatedModule, data: FederatedDataModule) -> None:
    """Tries network and loss on two blank inputs of the data set's shape and type; warns of a policy without buffers.

    Raises:
        ValueError: if it cannot take them, gives something else than scores or fewer than there are classes, or the
            loss cannot take these.
    """
    shape, num_classes = data.dataset.shape, data.dataset.num_classes
    network = type(module.network).__name__
    module.eval()
    try:
        scores = module(_blank(data, 2))
    except Exception as error:
        raise ValueError(
            f"model.network: {network} cannot take inputs of shape {shape} and {data.dataset.dtype}, which "
            f"{type(data.dataset).__name__} gives ({type(error).__name__}: {error}). Set the network's arguments to "
            "fit, e.g. in_channels and image_size."
        ) from error
    if not isinstance(scores, Tensor):
        raise ValueError(
            f"model.network: {network} gives a {type(scores).__name__}; needed is one tensor of scores [B, classes]."
        )
    if scores.dim() != 2 or scores.shape[1] < num_classes:
        raise ValueError(
            f"model.network: {network} gives scores of shape {tuple(scores.shape[1:])}, but "
            f"{type(data.dataset).__name__} has {num_classes} classes: set its num_classes to {num_classes}."
        )
    try:
        module.loss(scores, torch.zeros(2, dtype=torch.int64, device=scores.device))
    except Exception as error:
        raise ValueError(
            f"model.loss: {type(module.loss).__name__} cannot take scores {list(scores.shape)} and labels [2] "
            f"({type(error).__name__}: {error}). Use one that can, e.g. CrossEntropyLoss, or wrap it."
        ) from error
    if module.buffer_policy != "average" and module.buffer_layout is None:
        warnings.warn(f"model.buffer_policy: {network} has no buffers, so it has no effect.", stacklevel=2)


def check_batches(module: FederatedModule, data: FederatedDataModule) -> None:
    """Refuses batches of one sample where the module cannot train on them, as with batch normalisation.

    Such a batch would end the run in whichever round it comes up.

    Args:
        module: its `training_step` is tried on blank inputs, in a copy.
        data: set up, because the clients' sizes decide.

    Raises:
        ValueError: if some client's pass ends with one sample and the module cannot take it; names the first.
    """
    sizes, batch_size = data.population.sizes.tolist(), data.batch_size
    lengths = [pass_length(size, batch_size, data.drop_last) for size in sizes]
    single = [client for client, length in enumerate(lengths) if (length - 1) % batch_size == 0]
    error = _step_error(module, data, 1) if single else None
    if error is None or _step_error(module, data, 2) is not None:  # a step that always fails says why itself
        return
    cures = []
    if batch_size == 1:
        cures.append("set data.batch_size to 2 or more")
    elif any(sizes[client] > 1 for client in single):
        cures.append("set data.drop_last=true, or another data.batch_size")
    if any(sizes[client] == 1 for client in single):
        cures.append("a client with one training sample needs a data.partition with larger clients")
    first = single[0]
    raise ValueError(
        f"data.batch_size: got {batch_size}, which leaves {len(single)} of {len(sizes)} clients a batch of one sample "
        f"(the first is client {first} with {sizes[first]} training samples), and {type(module.network).__name__} "
        f"cannot train on that ({error}): {'; '.join(cures)}."
    )


def _step_error(module: FederatedModule, data: FederatedDataModule, number: int) -> Exception | None:
    """What a training step on so many blank inputs raises; the module stays as it is."""
    trial = copy.deepcopy(module).train()
    try:
        with rng.scope(0, "check batches"), trial.collecting():
            trial.training_step((_blank(data, number), torch.zeros(number, dtype=torch.int64)), 0)
    except Exception as error:
        return error
    return None


def _blank(data: FederatedDataModule, number: int) -> Tensor:
    return torch.zeros(number, *data.dataset.shape, dtype=data.dataset.dtype)
