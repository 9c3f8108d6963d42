"""The base class of clusterings and the warm-up rounds that they may ask for."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor

from lcfl.core.callback import Callback
from lcfl.core.messages import Downlink, Uplink
from lcfl.core.state import FederationState
from lcfl.methods.exchange import Exchange
from lcfl.methods.local.training import LocalUpdate
from lcfl.models.layout import Layout

if TYPE_CHECKING:  # half a second to import, and only a run that draws needs it
    from matplotlib.figure import Figure

__all__ = ["Clustering", "NewcomerView", "ExtraRound", "ServerView", "check_num_clusters"]


class ServerView(Protocol):
    """What a clustering may ask the federation for."""

    @property
    def seed(self) -> int:
        """The run's seed, for `lcfl.core.rng`."""

    @property
    def layout(self) -> Layout:
        """How models lie in flat vectors."""

    def initial_model(self, number: int) -> Tensor:
        """The initial model ``[P + Q]`` of that number, drawn in a stream of its own; number 0 is everybody's."""

    @property
    def has_proxy(self) -> bool:
        """Whether the server has a proxy set, images that no client holds."""

    def proxy_accuracy(self, models: Sequence[Tensor]) -> list[float]:
        """The accuracy of each of these models ``[P + Q]`` on the proxy set."""

    def log(self, name: str, value: float) -> None:
        """Adds a metric to this round's row."""


class NewcomerView(Protocol):
    """What a clustering may ask of a client that joins a federation which has ended."""

    @property
    def layout(self) -> Layout:
        """How models lie in flat vectors."""

    def run(self, downlink: Downlink, exchange: Exchange, local_update: LocalUpdate | None = None) -> Uplink:
        """Local work, the method's own if none is given, from a model that is sent down; what comes up."""

    def losses(self, model_KP: Tensor) -> list[float]:
        """The losses on the client's training images of models ``[K, P + Q]`` that are sent down."""


@dataclass(frozen=True)
class ExtraRound:
    """A round beside the training rounds: who takes part and what it does, without pulls.

    Before the first round, or between two (`Clustering.extra_round`). The clients keep nothing of it: neither a model
    nor how far they came in their batch order.

    Attributes:
        clients: their numbers; in `Clustering.warmup_rounds` their places among the clients that are no newcomers.
        local_update: the local work; None for the method's own.
        exchange: what crosses the wire; None for the initial model down and what the method's own exchange sends up.
        sends_own: without an `exchange`: what the method's own exchange sends goes down instead of the initial model.
    """

    clients: Sequence[int]
    local_update: LocalUpdate | None = None
    exchange: Exchange | None = None
    sends_own: bool = False


class Clustering(Callback):
    """Decides who belongs together: sets `assignment` and the number of `centres` in the state.

    Runs in `on_round_end`, after the uploads of a round are in and before they are aggregated, in the
    order in which `method.clustering` lists them.

    Class attributes:
        reads: the names in an uplink that it looks at.
        needs_centres: whether it compares with one centre per cluster.
        has_extra_rounds: whether `extra_round` ever asks for one; what noise on uploads guarantees is then not known.
        newcomer_rule: in words, what `place_newcomer` does.
    """

    shapes_result = True
    reads: ClassVar[tuple[str, ...]] = ("model",)
    needs_centres: ClassVar[bool] = True
    newcomer_rule: ClassVar[str] = "the cluster whose model has the smallest loss on the newcomer's training images"
    has_extra_rounds: ClassVar[bool] = False

    @property
    def uses_stored(self) -> bool:
        """Whether it looks at the stored models of clients that did not take part in the round."""
        return False

    def check(self, num_clients: int) -> None:
        """Raises a ValueError for a setting that cannot work with so many clients."""

    def check_layout(self, layout: Layout) -> None:
        """Raises a ValueError for a setting that does not fit the network."""

    def warmup_rounds(self, num_clients: int) -> list[ExtraRound]:
        """The warm-up rounds it needs, in order; `on_extra_round_end` is called after each."""
        return []

    def extra_round(self, state: FederationState, sampled: Sequence[int]) -> ExtraRound | None:
        """One more round that it needs before training round ``state.round`` with the clients `sampled`, if any.

        Asked again after each one, whose uploads go to `on_extra_round_end`. Its bytes are counted in the training
        round.
        """
        return None

    def figures(self, state: FederationState) -> "dict[str, Figure]":
        """Pictures of its own by name; `Monitor` writes them once the warm-up rounds are over."""
        return {}

    def place_newcomer(self, newcomer: NewcomerView, state: FederationState) -> int:
        """The cluster of a client that joins after the last round; changes nothing.

        Here the one whose model has the smallest loss on the newcomer's training images, the lowest number in a tie:
        that needs nothing but the models, so it is there for every clustering. A clustering with a rule of its own
        overrides this and says so in `newcomer_rule`.
        """
        losses = [inf if isnan(loss) else loss for loss in newcomer.losses(state.centres)]
        return losses.index(min(losses))


def check_num_clusters(clustering: Clustering, num_clusters: int | None, num_clients: int) -> None:
    """K is at most N, where it is given.

    Raises:
        ValueError: if it is not.
    """
    if num_clusters is not None and num_clusters > num_clients:
        raise ValueError(
            f"method.clustering: {type(clustering).__name__} got num_clusters={num_clusters} for data.num_clients="
            f"{num_clients}; at most one cluster per client: lower num_clusters or raise data.num_clients."
        )
