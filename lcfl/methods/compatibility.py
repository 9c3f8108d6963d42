"""Which local updates, exchanges, aggregations and clusterings work together.

`Method` calls `check_combination` when it is made. A run calls the other checks before it loads data.
"""

import warnings
from collections.abc import Sequence
from inspect import isabstract
from typing import Literal

from lcfl.methods import exchange as exchanges
from lcfl.methods.aggregation import Aggregation
from lcfl.methods.clustering.base import Clustering
from lcfl.methods.exchange import Exchange
from lcfl.methods.exchange.transforms import LowRankCompression
from lcfl.methods.exchange.transforms.base import TRANSFORMABLE
from lcfl.methods.local.training import LocalTraining, LocalUpdate

__all__ = ["check_combination", "check_rounds", "check_start", "start_of"]


def check_combination(
    local_update: LocalUpdate, exchange: Exchange, aggregation: Aggregation, clusterings: Sequence[Clustering]
) -> None:
    """Refuses parts that do not fit together; warns about transforms without an effect.

    Raises:
        ValueError: if a part reads what no other part sends, if the exchange uploads what no other part makes or reads,
            or if a part needs models or centres that do not exist, or uploads that transforms do not change.
    """
    exchange.check_attributes("sends", "models", "reported")
    readers: list[Aggregation | Clustering] = [aggregation, *clusterings]
    _check_reads(local_update, exchange, readers)
    _check_extras(local_update, exchange, aggregation, readers)
    for kind in exchange.models:
        exchange.evaluation_update(kind, local_update)
    _check_own_models(local_update, exchange)
    _check_stored_models(exchange, aggregation, clusterings)
    _check_transforms(exchange, aggregation, clusterings)


def _check_reads(local_update: LocalUpdate, exchange: Exchange, readers: Sequence[Aggregation | Clustering]) -> None:
    """Refuses a part that reads what the exchange does not send or upload."""
    for part in readers:
        missing = [name for name in part.reads if name not in exchange.returns]
        if missing:
            raise ValueError(
                f"method: {_name(part)} reads {', '.join(missing)} from the uploads, but {_name(exchange)} "
                f"uploads {', '.join(exchange.returns) or 'nothing'}. Use an exchange that uploads it: "
                f"{', '.join(_exchanges_that('returns', missing)) or 'a custom one'}."
                + " (What comes only in warm-up or extra rounds is not in reads.)"
                * isinstance(part, Clustering)
            )
    unsent = [name for name in local_update.reads if name not in exchange.sends]
    if unsent:
        raise ValueError(
            f"method: {_name(local_update)} reads {', '.join(unsent)} from the downlink, but "
            f"{_name(exchange)} sends {', '.join(exchange.sends) or 'nothing'}. Use an exchange that sends it: "
            f"{', '.join(_exchanges_that('sends', unsent)) or 'a custom one'}."
        )


def _check_extras(
    local_update: LocalUpdate, exchange: Exchange, aggregation: Aggregation, readers: Sequence[Aggregation | Clustering]
) -> None:
    """Refuses an exchange that uploads, in addition to the model, what no other part makes or reads."""
    unmade = [name for name in exchange.returns if name != "model" and name not in exchange.extras]
    if unmade and type(exchange).up is Exchange.up:
        raise ValueError(
            f"method: {_name(exchange)} returns {', '.join(unmade)}, but nothing makes it. Define up, or list it "
            "in extras if the local update provides it."
        )
    provided = local_update.provides
    missing = [name for name in exchange.extras if name in exchange.returns and name not in provided]
    if missing:
        raise ValueError(
            f"method: {_name(exchange)} uploads {', '.join(missing)}, which {_name(local_update)} does not "
            "provide. Use a local update that provides it, or another exchange."
        )
    read = {name for part in readers for name in part.reads}.union(aggregation.also_reads)
    # AllCentres is also used with clusterings that do not read which cluster a client has chosen.
    unread = [name for name in exchange.extras if name not in {"model", "cluster", *read}]
    if unread:
        raise ValueError(
            f"method: {_name(exchange)} uploads {', '.join(unread)}, but {_name(aggregation)} does not use it. Use "
            "an aggregation that does, or an exchange that uploads the model alone."
        )
    if "control_change" in exchange.extras and getattr(aggregation, "rule", None) is not None:
        raise ValueError(
            f"method: {_name(exchange)} uploads control variates, to which the rule of {_name(aggregation)} does "
            "not apply, so that one client could mislead all others. Set rule to null, or use another exchange."
        )


def _check_own_models(local_update: LocalUpdate, exchange: Exchange) -> None:
    """Refuses an exchange that does not keep the model that the local update needs, or uploads the wrong one."""
    if local_update.uses_own_model and not exchange.keeps_model:
        raise ValueError(
            f"method: {_name(local_update)} needs the model that a client keeps, but with {_name(exchange)} "
            "clients keep none. Use an exchange that keeps it, e.g. EnvelopeModel or ClusterReference."
        )
    if "model" in local_update.provides and exchange.returns and "model" not in exchange.extras:
        raise ValueError(
            f"method: {_name(local_update)} trains one model for the server and one for the client, but "
            f"{_name(exchange)} would upload that of the client. Use EnvelopeModel."
        )


def _check_stored_models(exchange: Exchange, aggregation: Aggregation, clusterings: Sequence[Clustering]) -> None:
    """Refuses parts that need stored models or centres that do not exist."""
    stores = exchange.keeps_model and exchange.uploads_whole
    if aggregation.uses_stored_models and not stores:
        raise ValueError(
            f"method: {_name(aggregation)} over stored models needs an exchange whose clients keep the model that "
            f"they upload, but {_name(exchange)} keeps none. Set over and embedding_over to participants, or use "
            "CentreAndEmbedding."
        )
    for clustering in clusterings:
        if clustering.uses_stored_models and not stores:
            raise ValueError(
                f"method: {_name(clustering)} uses stored models, but {_name(exchange)} keeps none. Use "
                "ClusterModel with keeps_model: true, or CentreAndEmbedding."
            )
        if clustering.needs_centres and not aggregation.keeps_centres:
            raise ValueError(
                f"method: {_name(clustering)} needs a centre for every cluster, but {_name(aggregation)} makes one "
                "model for all clients. Use ClusterMean, or set clustering: []."
            )


def _check_transforms(exchange: Exchange, aggregation: Aggregation, clusterings: Sequence[Clustering]) -> None:
    """Refuses transforms in the wrong order, and those that change what another part needs unchanged."""
    transforms, returns = exchange.transforms, exchange.returns
    unknown = [name for name in returns if name not in TRANSFORMABLE]
    if transforms and not exchange.uploads_whole:
        raise ValueError(
            "method.exchange: transforms work only on uploads of whole trained models; "
            f"{_name(exchange)} uploads a part of the trained model, or a different model. Set transforms: []."
        )
    if transforms and unknown:
        raise ValueError(
            f"method.exchange: transforms work only on uploads of {', '.join(TRANSFORMABLE)}; {_name(exchange)} "
            f"uploads {', '.join(unknown)}. Set transforms: []."
        )
    for clustering in clusterings:
        if transforms and clustering.hands_out_uploads:
            raise ValueError(
                f"method: {_name(clustering)} with keep_offline_models gives clients what the server has received "
                "of their offline models, which transforms change. Set keep_offline_models to false, or "
                "transforms: []."
            )
    if any(isinstance(transform, LowRankCompression) for transform in transforms[:-1]):
        raise ValueError("method.exchange: LowRankCompression must be the last of the transforms.")
    is_late = any(noise.before == "aggregation" for noise in exchange.noises)
    readers: list[tuple[Aggregation | Exchange, str]] = [
        (aggregation, ", or over and embedding_over to participants"),
        (exchange, ""),
    ]
    for part, instead in readers:
        if is_late and part.uses_stored_models:
            raise ValueError(
                f"method.exchange: GaussianNoise with before: aggregation adds noise to the uploads of a round, "
                f"but {_name(part)} merges stored models, which have none. Set before: upload{instead}."
            )
    if transforms and not returns:
        warnings.warn(
            f"method.exchange: transforms have no effect, because {_name(exchange)} uploads nothing.",
            stacklevel=5,
        )


def check_rounds(exchange: Exchange, clusterings: Sequence[Clustering], num_clients: int) -> None:
    """Refuses clusterings that disturb each other, and warm-up rounds that the exchange cannot serve.

    Raises:
        ValueError: if of two clusterings each would take the other's uploads for its own, or replace its first
            clusters, or if a warm-up round trains models that the exchange cannot exchange.
    """
    asking = [each for each in clusterings if each.has_extra_rounds or each.warmup_rounds(num_clients)]
    setting = [each for each in clusterings if each.sets_clusters or each.warmup_rounds(num_clients)]
    if len(asking) < 2 <= len(setting):
        raise ValueError(
            f"method.clustering: got {_name(setting[0])} and {_name(setting[1])}, which both set the first clusters. "
            "Leave one of them."
        )
    if len(asking) > 1:
        raise ValueError(
            f"method.clustering: got {_name(asking[0])} and {_name(asking[1])}, which both have clients train before "
            "or between rounds; the uploads would reach both. Leave one of them."
        )
    for clustering in clusterings:
        warmup = clustering.warmup_rounds(num_clients)
        uses_own = any(extra.exchange is None or extra.local_update is None for extra in warmup)
        if uses_own and not exchange.joins_warmup:
            raise ValueError(
                f"method: {_name(clustering)} begins with a warm-up round of plain local training, which "
                f"{_name(exchange)} cannot exchange. Use another clustering, or an exchange such as ClusterModel."
            )


def start_of(local_update: LocalUpdate) -> str | None:
    """Returns where a run starts if the client is not sent a model; None for an update that does not say it.

    A user's update may have a `start` of another meaning and with other values.
    """
    start = getattr(local_update, "start", None)
    return start if start in ("own", "centre", "embedding") else None


def check_start(local_update: LocalUpdate, exchange: Exchange) -> None:
    """Refuses a local update without a model to start from; warns about a start that another one replaces."""
    if (start := start_of(local_update)) is None:
        return
    # User-defined parts may find a model where the parts of lcfl cannot.
    is_ours = type(local_update).__module__.startswith("lcfl.") and type(exchange).at_client is Exchange.at_client
    if "model" in (local_update.adds or exchange.sends):
        if start != "own":
            source = f"{_name(local_update)} chooses" if local_update.adds else f"{_name(exchange)} sends"
            warnings.warn(
                f"method.local_update: start={start} has no effect: {source} a model, and local runs start from it.",
                stacklevel=3,
            )
    elif start != "own" and start not in (*exchange.sends, *local_update.adds):
        raise ValueError(
            f"method.local_update: got start={start}, but {_name(exchange)} sends no {start}; use start=own or an "
            "exchange that sends it, e.g. CentreAndEmbedding."
        )
    elif start != "centre" and not exchange.keeps_model and is_ours:
        has_choice = "centre" in exchange.sends and isinstance(local_update, LocalTraining)
        raise ValueError(
            f"method.local_update: {_name(local_update)} starts from the client's own model, but with "
            f"{_name(exchange)} clients keep no model and receive none to start from; use "
            f"{'start=centre or ' if has_choice else ''}an exchange that sends a model or keeps it, e.g. FullModel."
        )


def _name(part: object) -> str:
    return type(part).__name__


def _exchanges_that(attribute: Literal["sends", "returns"], names: list[str]) -> list[str]:
    """Returns the names of lcfl's concrete exchanges whose downlinks or uploads contain all these names."""
    kinds = [kind for name in exchanges.__all__ if isinstance(kind := getattr(exchanges, name), type)]
    concrete = [kind for kind in kinds if issubclass(kind, Exchange) and not isabstract(kind)]
    return [kind.__name__ for kind in concrete if set(names) <= set(getattr(kind, attribute))]
