"""A method of federated learning, composed of four parts."""

import warnings
from dataclasses import dataclass, field, replace
from inspect import isabstract
from typing import Literal

from lcfl.core.validation import CheckedFields, check_instance
from lcfl.methods import exchange as exchanges
from lcfl.methods.aggregation import Aggregation
from lcfl.methods.clustering.base import Clustering, ExtraRound
from lcfl.methods.exchange import Exchange
from lcfl.methods.exchange.transforms import LowRankCompression, PrivacyGuarantee
from lcfl.methods.exchange.transforms.base import NAMES
from lcfl.methods.local.training import LocalUpdate

__all__ = ["Method"]


@dataclass
class Method(CheckedFields):
    """A method of federated learning: its local update, exchange, aggregation and clusterings.

    Args:
        local_update: what a client starts from and minimises.
        exchange: what the server sends down and what clients send up.
        aggregation: how uploads become the server's models.
        clustering: callbacks that group the clients at the end of a round, called in this order.

    Raises:
        TypeError: if a part has the wrong class.
        ValueError: if the parts do not fit together.
    """

    local_update: LocalUpdate
    exchange: Exchange
    aggregation: Aggregation
    clustering: list[Clustering] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts = {"local_update": LocalUpdate, "exchange": Exchange, "aggregation": Aggregation, "clustering": list}
        for name, kind in parts.items():
            check_instance(f"method.{name}", getattr(self, name), kind)
        for number, clustering in enumerate(self.clustering):
            check_instance(f"method.clustering.{number}", clustering, Clustering)
        self._check_messages()
        for model_kind in self.exchange.models:
            self.exchange.evaluation_update(model_kind, self.local_update)
        self._check_stored_models()
        self._check_transforms()

    def _check_messages(self) -> None:
        """Checks that all that a part reads is sent, and that what is sent beyond a model is provided and read."""
        exchange, aggregation = self.exchange, self.aggregation
        readers: list[Aggregation | Clustering] = [aggregation, *self.clustering]
        for part in readers:
            missing = [name for name in part.reads if name not in exchange.returns]
            if missing:
                raise ValueError(
                    f"method: {_name(part)} reads {', '.join(missing)} from the uploads, but {_name(exchange)} "
                    f"uploads {', '.join(exchange.returns) or 'nothing'}. Use an exchange that uploads it: "
                    f"{', '.join(_exchanges_that('returns', missing)) or 'a custom one'}."
                )
        unsent = [name for name in self.local_update.reads if name not in exchange.sends]
        if unsent:
            raise ValueError(
                f"method: {_name(self.local_update)} reads {', '.join(unsent)} from the downlink, but "
                f"{_name(exchange)} sends {', '.join(exchange.sends) or 'nothing'}. Use an exchange that sends it: "
                f"{', '.join(_exchanges_that('sends', unsent)) or 'a custom one'}."
            )
        unmade = [name for name in exchange.returns if name != "model" and name not in exchange.extras]
        if unmade and type(exchange).up is Exchange.up:
            raise ValueError(
                f"method: {_name(exchange)} returns {', '.join(unmade)}, but nothing makes it. Define up, or list it "
                "in extras if the local update provides it."
            )
        provided = self.local_update.provides
        missing = [name for name in exchange.extras if name in exchange.returns and name not in provided]
        if missing:
            raise ValueError(
                f"method: {_name(exchange)} uploads {', '.join(missing)}, which {_name(self.local_update)} does not "
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

    def _check_stored_models(self) -> None:
        """Checks that there are the stored models and the centres that a part needs."""
        exchange, aggregation = self.exchange, self.aggregation
        if self.local_update.uses_own_model and not exchange.keeps_model:
            raise ValueError(
                f"method: {_name(self.local_update)} needs the model that a client keeps, but with {_name(exchange)} "
                "clients keep none. Use an exchange that keeps it, e.g. EnvelopeModel or ClusterReference."
            )
        if "model" in self.local_update.provides and exchange.returns and "model" not in exchange.extras:
            raise ValueError(
                f"method: {_name(self.local_update)} trains one model for the server and one for the client, but "
                f"{_name(exchange)} would upload that of the client. Use EnvelopeModel."
            )
        stores = exchange.keeps_model and exchange.uploads_whole
        if aggregation.uses_stored_models and not stores:
            raise ValueError(
                f"method: {_name(aggregation)} over stored models needs an exchange whose clients keep the model that "
                f"they upload, but {_name(exchange)} keeps none. Set over and embedding_over to participants, or use "
                "CentreAndEmbedding."
            )
        for clustering in self.clustering:
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

    def _check_transforms(self) -> None:
        transforms, returns = self.exchange.transforms, self.exchange.returns
        unknown = [name for name in returns if name not in NAMES]
        if transforms and not self.exchange.uploads_whole:
            raise ValueError(
                "method.exchange: transforms work only on uploads of whole trained models; "
                f"{_name(self.exchange)} uploads a part of the trained model, or a different model. Set transforms: []."
            )
        if transforms and unknown:
            raise ValueError(
                f"method.exchange: transforms work only on uploads of {', '.join(NAMES)}; {_name(self.exchange)} "
                f"uploads {', '.join(unknown)}. Set transforms: []."
            )
        for clustering in self.clustering:
            if transforms and clustering.hands_out_uploads:
                raise ValueError(
                    f"method: {_name(clustering)} with keep_offline_models gives clients what the server has received "
                    "of their offline models, which transforms change. Set keep_offline_models to false, or "
                    "transforms: []."
                )
        if any(isinstance(transform, LowRankCompression) for transform in transforms[:-1]):
            raise ValueError("method.exchange: LowRankCompression must be the last of the transforms.")
        is_late = any(noise.before == "aggregation" for noise in self.exchange.noises)
        readers: list[tuple[Aggregation | Exchange, str]] = [
            (self.aggregation, ", or over and embedding_over to participants"),
            (self.exchange, ""),
        ]
        for part, instead in readers:
            if is_late and part.uses_stored_models:
                raise ValueError(
                    f"method.exchange: GaussianNoise with before: aggregation adds noise to the uploads of a round, "
                    f"but {_name(part)} merges stored models, which have none. Set before: upload{instead}."
                )
        if transforms and not returns:
            warnings.warn(
                f"method.exchange: transforms have no effect, because {_name(self.exchange)} uploads nothing.",
                stacklevel=4,
            )

    def calibrated(self, num_uploads: int, num_clients: int) -> "Method":
        """Returns the method with upload transforms whose settings follow from the length of the run.

        Args:
            num_uploads: the most uploads of any client in training rounds.
            num_clients: the number of clients, on which the number of warm-up rounds may depend.

        Raises:
            ValueError: if noise should reach an epsilon, but this method's clusterings make the epsilon unknown.
        """
        if not self.exchange.transforms:
            return self
        self._check_noise(num_clients)
        return replace(self, exchange=self.exchange.calibrated(num_uploads + len(self.warmup_rounds(num_clients))))

    def privacy_guarantee(self, num_uploads: int, num_clients: int) -> PrivacyGuarantee | None:
        """Returns what noise guarantees after so many uploads of a client and the warm-up rounds, or None."""
        if self._reason_for_no_guarantee(num_clients):
            return None
        return self.exchange.privacy_guarantee(num_uploads + len(self.warmup_rounds(num_clients)))

    def _check_noise(self, num_clients: int) -> None:
        noises = [noise for noise in self.exchange.noises if noise.clip]
        reason = self._reason_for_no_guarantee(num_clients)
        if not noises or not reason:
            return
        if any(noise.epsilon is not None for noise in noises):
            raise ValueError(
                f"method.exchange: GaussianNoise cannot guarantee an epsilon, because {reason}. Set sigma instead."
            )
        warnings.warn(f"method.exchange: GaussianNoise gives no privacy guarantee, because {reason}.", stacklevel=3)

    def _reason_for_no_guarantee(self, num_clients: int) -> str:
        """Returns why noise on uploads does not bound what clients reveal; empty if it does."""
        if any(noise.before == "aggregation" for noise in self.exchange.noises):
            return "the server and its clustering read the uploads before the noise is added"
        for clustering in self.clustering:
            if any(extra.exchange is not None for extra in clustering.warmup_rounds(num_clients)):
                return f"uploads in the warm-up round of {_name(clustering)} have no noise"
            if clustering.has_extra_rounds:
                return f"the number of rounds that {_name(clustering)} adds is unknown"
        return ""

    def warmup_rounds(self, num_clients: int) -> list[ExtraRound]:
        """Returns the warm-up rounds that the clusterings need."""
        return [extra for clustering in self.clustering for extra in clustering.warmup_rounds(num_clients)]

    @property
    def is_clustered(self) -> bool:
        """Whether the method has a clustering."""
        return bool(self.clustering)


def _name(part: object) -> str:
    return type(part).__name__


def _exchanges_that(attribute: Literal["sends", "returns"], names: list[str]) -> list[str]:
    """Returns the names of lcfl's concrete exchanges whose downlinks or uploads contain all these names."""
    kinds = [kind for name in exchanges.__all__ if isinstance(kind := getattr(exchanges, name), type)]
    concrete = [kind for kind in kinds if issubclass(kind, Exchange) and not isabstract(kind)]
    return [kind.__name__ for kind in concrete if set(names) <= set(getattr(kind, attribute))]
