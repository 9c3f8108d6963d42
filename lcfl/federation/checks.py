"""Checks for errors and for settings without an effect, before data are loaded or before training starts."""

import warnings
from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Integral

import torch
from lightning.pytorch import Callback as TrainerCallback
from torch import Tensor
from torch.optim import Optimizer

from lcfl.callbacks.checkpoint import Checkpoint
from lcfl.core import rng
from lcfl.core.callback import Callback, check_hooks
from lcfl.core.validation import abbreviated, check_instance, errors_of
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.faults import ClientFault, UpdateFault
from lcfl.methods.aggregation import ServerDynamics
from lcfl.methods.clustering import Clustering, HierarchicalUpdates, RecursiveBipartition
from lcfl.methods.exchange import Exchange
from lcfl.methods.local.corrected import ControlledTraining, DynamicTraining
from lcfl.methods.local.envelope import EnvelopeTraining
from lcfl.methods.local.meta import MetaTraining
from lcfl.methods.local.partial import FineTunedTraining
from lcfl.methods.local.training import LocalTraining
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule

__all__ = [
    "check_callbacks",
    "check_method",
    "check_optimizer",
    "check_parts",
    "number_of_clients",
    "warn_of_idle_clusterings",
    "warn_of_idle_faults",
    "warn_of_late_leavers",
    "warn_of_leavers",
]

# Lightning's Trainer calls these methods of a module; a federation does not call them.
TRAINER_HOOKS = ["validation_step", "test_step", "configure_gradient_clipping", "backward", "lr_scheduler_step"]
TRAINER_HOOKS += ["optimizer_step", "optimizer_zero_grad", "transfer_batch_to_device", "setup", "teardown"]
TRAINER_HOOKS += ["prepare_data", "configure_model", "configure_callbacks"]
TRAINER_HOOKS += [name for name in dir(FederatedModule) if name.startswith("on_")]


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
    """Refuses callbacks of ``lightning.Trainer``, clusterings, misspelt hooks, a second `Checkpoint`, other objects.

    Nothing would call a callback of ``lightning.Trainer``, and two `Checkpoint` would remove each other's files.
    """
    for callback in callbacks:
        if isinstance(callback, TrainerCallback):
            raise ValueError(
                f"trainer.callbacks: {type(callback).__name__} is a callback of lightning.Trainer and would never be "
                "called; use those of lcfl.callbacks (Checkpoint, EarlyStopping, Monitor, Progress) or derive from "
                "lcfl.Callback."
            )
        check_instance("trainer.callbacks", callback, Callback)
        if isinstance(callback, Clustering):
            raise ValueError(
                f"trainer.callbacks: {type(callback).__name__} is a clustering, which is a part of the method. List it "
                "in method.clustering."
            )
    if (number := sum(isinstance(callback, Checkpoint) for callback in callbacks)) > 1:
        raise ValueError(
            f"trainer.callbacks: got {number} Checkpoint; allowed is one, because each would remove the files of the "
            "others. One saves at regular intervals and after the best round, too: set its every_n_rounds and monitor."
        )
    check_hooks(callbacks)


def check_parts(model: object, datamodule: object, method: object) -> None:
    """Refuses objects of the wrong class as model, data module or method, which Python accepts, and another dtype.

    Raises:
        TypeError: for the first object of another class.
        ValueError: if tensors are not float32 by default.
    """
    if torch.get_default_dtype() != torch.float32:
        raise ValueError(
            f"torch.set_default_dtype: got {torch.get_default_dtype()}; a federation computes in torch.float32. Set it "
            "back, and choose the arithmetic of a training step with trainer.precision."
        )
    check_instance("model", model, FederatedModule)
    check_instance("datamodule", datamodule, FederatedDataModule)
    check_instance("method", method, Method)


def check_method(method: Method, module: FederatedModule, num_clients: int) -> None:
    """Refuses parts that cannot work together and warns about settings without an effect.

    Raises:
        ValueError: if a part cannot work with this number of clients or with the exchange, or if the module makes
            something other than one optimizer with finite settings.
    """
    optimizer = _checked_optimizer(module)
    check_hooks(method.clustering, "method.clustering")
    _check_rounds(method, num_clients)
    for clustering in method.clustering:
        clustering.check(num_clients)
        clustering.check_layout(module.layout)
        warmup = clustering.warmup_rounds(num_clients)
        uses_own = any(extra.exchange is None or extra.local_update is None for extra in warmup)
        if uses_own and not method.exchange.joins_warmup:
            raise ValueError(
                f"method: {type(clustering).__name__} begins with a warm-up round of plain local training, which "
                f"{type(method.exchange).__name__} cannot exchange. Use another clustering, or an exchange such as "
                "ClusterModel."
            )
    method.exchange.check(module.layout)
    method.local_update.check(module)
    _check_start(method)
    _check_parameters(module, optimizer)
    _check_automatic(module)
    _warn_of_hooks(module)
    _warn_of_feddyn(method)
    _warn_of_own_starts(method)
    _warn_of_weights(method)
    if type(method.exchange).__module__.startswith("lcfl."):  # a user's may send something else
        _warn_of_unused_parts(method)
    pulls = (*method.exchange.sends, *method.local_update.adds)
    name = type(method.exchange).__name__
    for weight, symbol, needed in (("cluster_weight", "mu", "centre"), ("global_weight", "lambda", "embedding")):
        reason = None if needed in pulls else f"{name} sends no {needed}"
        if not method.local_update.has_pulls:
            reason = f"{type(method.local_update).__name__} has no pulls"
        if getattr(module, weight) > 0 and reason is not None:
            warnings.warn(
                f"model.{weight} ({symbol}) = {getattr(module, weight)} has no effect: {reason}.", stacklevel=2
            )
    _warn_of_large_steps(module, optimizer, pulls)


def _check_rounds(method: Method, num_clients: int) -> None:
    """Refuses two clusterings of which each takes the other's uploads for its own, or replaces its first clusters."""
    asking = [each for each in method.clustering if each.has_extra_rounds or each.warmup_rounds(num_clients)]
    setting = [each for each in method.clustering if each.sets_clusters or each.warmup_rounds(num_clients)]
    if len(asking) < 2 <= len(setting):
        first, second, *_ = (type(each).__name__ for each in setting)
        raise ValueError(
            f"method.clustering: got {first} and {second}, which both set the first clusters. Leave one of them."
        )
    if len(asking) > 1:
        first, second, *_ = (type(each).__name__ for each in asking)
        raise ValueError(
            f"method.clustering: got {first} and {second}, which both have clients train before or between rounds; the "
            "uploads would reach both. Leave one of them."
        )


def _check_start(method: Method) -> None:
    """Refuses a local update without a model to start from; warns about a start that another one replaces."""
    local_update, exchange, name = method.local_update, method.exchange, type(method.exchange).__name__
    if not isinstance(local_update, LocalTraining | MetaTraining | EnvelopeTraining):
        return
    start = local_update.start
    # User-defined parts may find a model where the parts of lcfl cannot.
    is_ours = type(local_update).__module__.startswith("lcfl.") and type(exchange).at_client is Exchange.at_client
    if "model" in (local_update.adds or exchange.sends):
        if start != "own":
            source = f"{type(local_update).__name__} chooses" if local_update.adds else f"{name} sends"
            warnings.warn(
                f"method.local_update: start={start} has no effect: {source} a model, and local runs start from it.",
                stacklevel=3,
            )
    elif start != "own" and start not in (*exchange.sends, *local_update.adds):
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


def _warn_of_unused_parts(method: Method) -> None:
    """Warns about parts that affect neither the models that clients are sent nor those that are evaluated."""
    name, source, aggregation = type(method.exchange).__name__, method.exchange.source, method.aggregation
    sent = {"global": "the global model", "clients": "means of the clients' models", "nothing": "nothing"}
    if method.is_clustered and source != "clusters":
        warnings.warn(
            f"method: {name} sends clients {sent[source]}, so no client trains the model of its cluster. Use "
            "ClusterModel, ClusterReference or ControlledClusterModel for that.",
            stacklevel=3,
        )
    unused = {"clients": ("rule", "optimizer"), "global": ("optimizer",) if aggregation.keeps_centres else ()}
    for option in unused.get(source, ()):
        if part := getattr(aggregation, option, None):
            advice = "Use GlobalMean instead." if source == "global" else "Leave it out."
            warnings.warn(
                f"method.aggregation: {option}={type(part).__name__} has no effect on clients, because {name} sends "
                f"{sent[source]}. {advice}",
                stacklevel=3,
            )
    if isinstance(method.local_update, FineTunedTraining) and method.exchange.adapts == "never":
        warnings.warn(
            "method.local_update: fine_tuned, fine_tuning_steps and fine_tuning_epochs have no effect, because "
            f"no client fine-tunes its model with {name}. Use AdaptedEmbedding or AdaptedModel, or replace "
            "FineTunedTraining by PartTraining.",
            stacklevel=3,
        )


def _warn_of_feddyn(method: Method) -> None:
    """Warns if only the clients or only the server follow FedDyn, or if clients are weighted by samples."""
    has_clients = isinstance(method.local_update, DynamicTraining)
    has_server = isinstance(getattr(method.aggregation, "optimizer", None), ServerDynamics)
    if has_clients != has_server:
        there, missing = sorted(("DynamicTraining", "ServerDynamics"), reverse=has_server)
        warnings.warn(
            f"method: {there} is one half of FedDyn, and {missing} is the other. Use both, as "
            "configs/methods/feddyn.yaml does, or neither.",
            stacklevel=3,
        )
    if has_clients and getattr(method.aggregation, "weights", "uniform") == "samples":
        warnings.warn(
            "method.aggregation: with weights=samples, FedDyn converges to a wrong model unless all clients take part "
            "in every round, because h is no longer a mean of the clients' corrections. Use weights=uniform.",
            stacklevel=3,
        )
    changing = [f"method.exchange: the transform {type(each).__name__}" for each in method.exchange.transforms]
    if rule := getattr(method.aggregation, "rule", None):
        changing.append(f"method.aggregation: the rule {type(rule).__name__}")
    if has_clients and changing:
        warnings.warn(
            f"{changing[0]} makes FedDyn converge to a wrong model, because the server's h is no longer a mean of the "
            "clients' corrections. Leave it out, or use LocalTraining without ServerDynamics.",
            stacklevel=3,
        )


def _warn_of_own_starts(method: Method) -> None:
    """Warns if clients do not start from the common model, whose updates a clustering compares."""
    starts_own = getattr(method.local_update, "start", None) == "own" and "model" not in method.exchange.sends
    for clustering in method.clustering:
        if isinstance(clustering, HierarchicalUpdates) and method.exchange.keeps_model and starts_own:
            warnings.warn(
                "method.clustering: HierarchicalUpdates compares updates from the common model, but with start=own "
                "clients start from their own models. Set start=centre in method.local_update.",
                stacklevel=3,
            )


def _warn_of_weights(method: Method) -> None:
    """Warns if a clustering tests another mean of the updates than the aggregation takes."""
    taken = getattr(method.aggregation, "weights", None)
    if taken is None or getattr(method.aggregation, "rule", None) is not None:
        return  # it takes no mean, or nobody knows which
    for clustering in method.clustering:
        if isinstance(clustering, RecursiveBipartition) and clustering.weights != taken:
            warnings.warn(
                f"method.clustering: RecursiveBipartition tests a mean with weights={clustering.weights}, but the "
                f"aggregation takes one with weights={taken}. Only the latter vanishes when training has converged. "
                "Set both alike.",
                stacklevel=3,
            )


def warn_of_idle_clusterings(
    clusterings: Sequence[Clustering], rounds: int, clients_per_round: int, num_clients: int
) -> None:
    """Warns about clusterings that would begin after the last round, or that need rounds with all clients."""
    for clustering in clusterings:
        name = f"method.clustering: {type(clustering).__name__}"
        if clustering.begins >= max(rounds, 1):
            warnings.warn(
                f"{name} begins in round {clustering.begins}, but the run has {rounds} rounds (from 0), so it has no "
                "effect.",
                stacklevel=3,
            )
        if clustering.needs_everyone is not None and clients_per_round < num_clients:
            warnings.warn(
                f"{name}: only {clients_per_round} of {num_clients} clients take part in a round, but "
                f"{clustering.needs_everyone}",
                stacklevel=3,
            )


def warn_of_idle_faults(faults: Sequence[ClientFault], rounds: int, exchange: Exchange) -> None:
    """Warns about faults that would begin after the last round, or that change updates that are never sent."""
    for fault in faults:
        if isinstance(fault, UpdateFault) and not exchange.returns:
            warnings.warn(
                f"data.faults: {type(fault).__name__} has no effect, except that its clients are not evaluated, "
                f"because with {type(exchange).__name__} clients send nothing.",
                stacklevel=3,
            )
        if fault.rounds is not None and fault.rounds[0] is not None and fault.rounds[0] >= rounds:
            warnings.warn(
                f"data.faults: {type(fault).__name__} begins in round {fault.rounds[0]}, but the run has {rounds} "
                "rounds (from 0), so it has no effect, except that its clients are not evaluated.",
                stacklevel=3,
            )


def warn_of_late_leavers(leavers: Mapping[int, int], rounds: int) -> None:
    """Warns about clients that would leave after the last round."""
    if late := [client for client, number in leavers.items() if number >= rounds]:
        warnings.warn(
            f"data.leavers: clients {abbreviated(late)} would leave after the last round, because the run has {rounds} "
            "rounds (from 0), so they stay.",
            stacklevel=3,
        )


def warn_of_leavers(method: Method) -> None:
    """Warns if the server keeps a mean of what its clients remember, which a client that leaves stays a part of."""
    if isinstance(method.local_update, ControlledTraining | DynamicTraining):
        mean = "c" if isinstance(method.local_update, ControlledTraining) else "h"
        warnings.warn(
            f"data.leavers: {type(method.local_update).__name__} corrects with {mean}, a mean over all clients, and a "
            "client that leaves stays a part of it. So the model does not reach the optimum of the other clients. A "
            "method that remembers nothing of its clients does, e.g. fedprox.",
            stacklevel=3,
        )


def _check_parameters(module: FederatedModule, optimizer: Optimizer) -> None:
    """Refuses an optimizer of parameters that are no part of a model: one client would go on with those of another."""
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    names = [name for name, each in module.named_parameters() if id(each) in trained]
    if outside := [name for name in names if not name.startswith("network.")]:
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers: got parameters outside of the network: "
            f"{abbreviated(outside)}. They would be neither sent nor saved, and each client would go on with those of "
            "another one. Make them a part of model.network, or leave them out."
        )


def _check_automatic(module: FederatedModule) -> None:
    """Refuses manual optimization: the engines, and many methods, take the steps from the loss that a step returns."""
    if not module.automatic_optimization:
        raise ValueError(
            f"model: {type(module).__name__} sets automatic_optimization=False, but in a federation lcfl takes the "
            "steps. Remove it, return the loss from training_step, and the optimizer from configure_optimizers."
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


def _checked_optimizer(module: FederatedModule) -> Optimizer:
    """Returns the module's optimizer, after it has checked that it is one and that its settings are finite."""
    with errors_of("model.optimizer"):
        optimizer = module.configure_optimizers()
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers: got {type(optimizer).__name__}; a local run needs one "
            "torch.optim.Optimizer. A learning rate that changes from round to round is lr_decay of "
            "LocalTraining, or its lr_factor."
        )
    for name, value in ((name, value) for group in optimizer.param_groups for name, value in group.items()):
        numbers = value if isinstance(value, tuple | list) else [value]
        if name != "params" and not all(isfinite(each) for each in numbers if isinstance(each, int | float | Tensor)):
            raise ValueError(
                f"model.optimizer: {type(optimizer).__name__} got {name}={value}; it must be a finite number."
            )
    return optimizer


def _warn_of_large_steps(module: FederatedModule, optimizer: Optimizer, pulls: tuple[str, ...]) -> None:
    pull = module.cluster_weight * ("centre" in pulls) + module.global_weight * ("embedding" in pulls)
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
    parameters = module.trained_parameters()
    values = [parameter.detach().clone() for parameter in parameters]
    optimizer = module.configure_optimizers()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
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
