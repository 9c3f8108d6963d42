"""Warnings about parts and options of a run that have no effect, or another one than expected."""

import warnings
from collections.abc import Mapping, Sequence

from lcfl.core.validation import abbreviated
from lcfl.data.faults import ClientFault, UpdateFault
from lcfl.methods.aggregation import ServerDynamics
from lcfl.methods.clustering import Clustering, HierarchicalUpdates, RecursiveBipartition
from lcfl.methods.compatibility import start_of
from lcfl.methods.exchange import (
    AttentiveReference,
    CentreAndEmbedding,
    ClusterReference,
    Exchange,
    GlobalReference,
)
from lcfl.methods.local import DittoTraining
from lcfl.methods.local.corrected import ControlledTraining, DynamicTraining
from lcfl.methods.local.partial import FineTunedTraining
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule

__all__ = [
    "warn_of_idle_clusterings",
    "warn_of_idle_faults",
    "warn_of_idle_pulls",
    "warn_of_late_leavers",
    "warn_of_leavers",
    "warn_of_method",
    "warn_of_missing_weights",
]

# Parts that are there for pulls: a method that has them, and the weights in its file.
PULLED: dict[type, tuple[str, dict[str, float]]] = {
    AttentiveReference: ("fedamp", {"cluster_weight": 1.0}),
    CentreAndEmbedding: ("lcfed", {"cluster_weight": 0.5, "global_weight": 0.5}),
    ClusterReference: ("cgpfl_prox", {"cluster_weight": 0.5}),
    DittoTraining: ("ditto", {"cluster_weight": 0.5}),
    GlobalReference: ("fedprox", {"cluster_weight": 0.01}),
}


def warn_of_method(method: Method) -> None:
    """Warns about parts of a method that do not add up to what they are for."""
    _warn_of_feddyn(method)
    _warn_of_own_starts(method)
    _warn_of_weights(method)
    if type(method.exchange).__module__.startswith("lcfl."):  # a user's may send something else
        _warn_of_unused_parts(method)


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
    starts_own = start_of(method.local_update) == "own" and "model" not in method.exchange.sends
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


def warn_of_idle_pulls(method: Method, module: FederatedModule) -> None:
    """Warns if the module has weights of pulls and the method has not what they pull towards."""
    pulls, name = (*method.exchange.sends, *method.local_update.adds), type(method.exchange).__name__
    for weight, symbol, needed in (("cluster_weight", "mu", "centre"), ("global_weight", "lambda", "embedding")):
        reason = None if needed in pulls else f"{name} sends no {needed}"
        if not method.local_update.has_pulls:
            reason = f"{type(method.local_update).__name__} has no pulls"
        if getattr(module, weight) > 0 and reason is not None:
            warnings.warn(
                f"model.{weight} ({symbol}) = {getattr(module, weight)} has no effect: {reason}.", stacklevel=3
            )


def warn_of_missing_weights(method: Method, module: FederatedModule) -> None:
    """Warns if the method has something to pull towards, and no other use for it, and the module has no weights."""
    update, exchange = method.local_update, method.exchange
    parts = [each for each in (update, exchange) if type(each) in PULLED]
    has_weights = module.cluster_weight > 0 or module.global_weight > 0
    steps = "regularizer", "training_step"  # the user's may pull with a weight of their own
    has_own = any(getattr(type(module), each) is not getattr(FederatedModule, each) for each in steps)
    is_users = not type(update).__module__.startswith("lcfl.")  # which may do anything with what was sent
    if not parts or has_weights or has_own or is_users or not update.has_pulls:
        return
    starts_there = exchange.keeps_model and start_of(update) in exchange.sends
    if starts_there or any(name in update.reads for name in exchange.sends if name != "model"):
        return
    name, (file, weights) = type(parts[0]).__name__, PULLED[type(parts[0])]
    advice = " and ".join(f"model.{weight}, e.g. to {value}" for weight, value in weights.items())
    warnings.warn(
        f"model.cluster_weight (mu) and model.global_weight (lambda) are 0, so {name} has no effect: clients are "
        f"pulled to nothing. Set {advice}, as configs/methods/{file}.yaml does.",
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
