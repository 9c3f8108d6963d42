"""A method of federated learning: four parts, and nothing else."""

from dataclasses import dataclass, field

from lcfl.aggregation import Aggregation, ClusterMean
from lcfl.clustering.base import Clustering, Opening
from lcfl.exchange import Exchange
from lcfl.local.update import LocalUpdate

__all__ = ["Method"]


@dataclass
class Method:
    """What a client does, what crosses the wire, how uploads are merged, and who belongs together.

    Args:
        local_update: what a client starts from and minimises.
        exchange: what goes down and what comes up.
        aggregation: how uploads become the server's models.
        clustering: callbacks that group the clients at the end of a round, in this order.

    Raises:
        ValueError: for parts that do not fit together.
    """

    local_update: LocalUpdate
    exchange: Exchange
    aggregation: Aggregation
    clustering: list[Clustering] = field(default_factory=list)

    def __post_init__(self) -> None:
        merged = self.aggregation
        over_stored = isinstance(merged, ClusterMean) and "stored" in (merged.over, merged.embedding_over)
        if over_stored and not self.exchange.keeps_model:
            raise ValueError(
                f"method: ClusterMean over stored models needs an exchange whose clients keep a model; "
                f"{type(self.exchange).__name__} keeps none. Set over and embedding_over to participants, or use "
                "CentreAndEmbedding."
            )

    def openings(self, num_clients: int) -> list[Opening]:
        """The opening rounds that its clusterings need."""
        return [opening for clustering in self.clustering for opening in clustering.openings(num_clients)]

    @property
    def is_clustered(self) -> bool:
        """Whether the method groups its clients at all."""
        return bool(self.clustering)
