"""A method of federated learning, composed of four parts."""

import warnings
from dataclasses import dataclass, field, replace

from lcfl.core.validation import CheckedFields, check_instance
from lcfl.methods.aggregation import Aggregation
from lcfl.methods.clustering.base import Clustering, ExtraRound
from lcfl.methods.compatibility import check_combination
from lcfl.methods.exchange import Exchange
from lcfl.methods.exchange.transforms import PrivacyGuarantee
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
        check_combination(self.local_update, self.exchange, self.aggregation, self.clustering)

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
                return f"uploads in the warm-up round of {type(clustering).__name__} have no noise"
            if clustering.has_extra_rounds:
                return f"the number of rounds that {type(clustering).__name__} adds is unknown"
        return ""

    def warmup_rounds(self, num_clients: int) -> list[ExtraRound]:
        """Returns the warm-up rounds that the clusterings need."""
        rounds = []
        for clustering in self.clustering:
            for extra in clustering.warmup_rounds(num_clients):
                extra.check(f"{type(clustering).__name__}.warmup_rounds", num_clients)
                rounds.append(extra)
        return rounds

    @property
    def is_clustered(self) -> bool:
        """Whether the method has a clustering."""
        return bool(self.clustering)
