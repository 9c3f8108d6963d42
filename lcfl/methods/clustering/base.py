"""The base class of clusterings, and the warm-up and extra rounds that they may request."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor

from lcfl.core.callback import Callback
from lcfl.core.messages import Downlink, Uplink
from lcfl.core.state import FederationState
from lcfl.core.validation import abbreviated
from lcfl.methods.exchange import Exchange
from lcfl.methods.local.training import LocalUpdate
from lcfl.models.layout import Layout

if TYPE_CHECKING:  # importing it takes half a second, and only runs that draw figures need it
    from matplotlib.figure import Figure

__all__ = ["Clustering", "NewcomerInterface", "ExtraRound", "ServerInterface", "check_num_clusters"]

# The advice of a clustering that got too few uploads from a warm-up or extra round.
NOTHING_USABLE = "lower the optimizer's learning rate, or raise trainer.max_update_norm if it is set."


class ServerInterface(Protocol):
    """The part of the federation that a clustering may use."""

    @property
    def seed(self) -> int:
        """The run's seed, for `lcfl.core.rng`."""

    @property
    def layout(self) -> Layout:
        """The layout of models in flat vectors."""

    def initial_model(self, number: int) -> Tensor:
        """Returns the initial model ``[P + Q]`` with this number.

        Each number has a separate random stream. Number 0 is the common initial model.
        """

    @property
    def has_proxy(self) -> bool:
        """Whether the server has a proxy set: samples that no client holds."""

    def proxy_score(self, models: Sequence[Tensor]) -> list[float]:
        """Returns the reported metric of each of these models ``[P + Q]`` on the proxy set, as a share from 0 to 1.

        A metric v whose smaller values are better counts as 1 / (1 + v).
        """

    def log(self, name: str, value: float) -> None:
        """Adds a metric to this round's row."""


class NewcomerInterface(Protocol):
    """The part of a newcomer that a clustering may use. A newcomer joins after training has ended."""

    @property
    def layout(self) -> Layout:
        """The layout of models in flat vectors."""

    def run(self, downlink: Downlink, exchange: Exchange, local_update: LocalUpdate | None = None) -> Uplink:
        """Sends `downlink`, runs the local update (None for the method's own), and returns the uplink.

        The run counts as a warm-up round, so its learning rate is that of the founders' warm-up.
        """

    def losses(self, model_KP: Tensor) -> list[float]:
        """Sends models ``[K, P + Q]`` down and returns the loss of each on the client's training samples."""


@dataclass(frozen=True)
class ExtraRound:
    """A round in addition to the training rounds: who takes part and what these clients do. It has no pulls.

    It takes place before the first round (`Clustering.warmup_rounds`) or between two (`Clustering.extra_round`). The
    clients keep nothing from it, neither a model nor their position in the batch order.

    Attributes:
        clients: the numbers of the clients. In `Clustering.warmup_rounds` they are positions among the clients that
            are not newcomers.
        local_update: the local update; None for the method's own.
        exchange: what crosses the wire. None sends the initial model down, and uploads what the method's own exchange
            uploads.
        sends_own: only without an `exchange`: whether the method's own exchange decides what goes down, instead of the
            initial model.
    """

    clients: Sequence[int]
    local_update: LocalUpdate | None = None
    exchange: Exchange | None = None
    sends_own: bool = False

    def check(self, by: str, num_clients: int) -> None:
        """Raises a ValueError for clients that do not exist or occur twice, and for an exchange without `sends`.

        Args:
            by: whose round it is, for the message.
            num_clients: the number of clients.
        """
        numbers = [int(client) for client in self.clients]
        if len(set(numbers)) < len(numbers) or not set(numbers) <= set(range(num_clients)):
            raise ValueError(
                f"{by}: got an ExtraRound with clients {abbreviated(numbers)}; they must be different numbers from 0 "
                f"to {num_clients - 1}."
            )
        if self.exchange is not None:
            self.exchange.check_attributes("sends")


class Clustering(Callback):
    """Base class of clusterings, which decide which clients belong together.

    A clustering sets `assignment` and the number of `centres` in the state. Most do so in `on_round_end`, after the
    uploads of a round have arrived and before they are aggregated. Those with warm-up or extra rounds do so in
    `on_extra_round_end`. Several clusterings run in the order in which `method.clustering` lists them. A cluster keeps
    its number from round to round, because ``state.centres`` is indexed by it; see `keep_numbers`.

    Class attributes:
        reads: the names in an uplink of a training round that it uses. Warm-up and extra rounds have exchanges of their
            own.
        needs_centres: whether it compares clients with one centre per cluster.
        has_extra_rounds: whether `extra_round` ever requests a round. If so, the privacy guarantee of noise on uploads
            is unknown.
        sets_clusters: whether it sets all clusters when training begins.
    """

    shapes_result = True
    reads: ClassVar[tuple[str, ...]] = ("model",)
    needs_centres: ClassVar[bool] = True
    has_extra_rounds: ClassVar[bool] = False
    sets_clusters: ClassVar[bool] = False

    @property
    def hands_out_uploads(self) -> bool:
        """Whether clients begin with what the server has received of their models in a warm-up round."""
        return False

    @property
    def uses_stored_models(self) -> bool:
        """Whether it uses stored models of clients that did not take part in the round."""
        return False

    @property
    def begins(self) -> int:
        """The first training round in which it may change a cluster."""
        return 0

    @property
    def needs_everyone(self) -> str | None:
        """Why all clients should take part in every round, and what to change; None if they need not."""
        return None

    @property
    def newcomer_rule(self) -> str:
        """What `place_newcomer` does, in words for users. A class attribute may say it, too."""
        return "the cluster whose model has the smallest loss on the newcomer's training samples"

    def check(self, num_clients: int) -> None:
        """Raises a ValueError for a setting that cannot work with this number of clients."""

    def check_layout(self, layout: Layout) -> None:
        """Raises a ValueError for a setting that does not fit the network."""

    def warmup_rounds(self, num_clients: int) -> list[ExtraRound]:
        """Returns the warm-up rounds that it needs, in order. `on_extra_round_end` is called after each one."""
        return []

    def extra_round(self, state: FederationState, sampled: Sequence[int]) -> ExtraRound | None:
        """Returns one more round that it needs before training round ``state.round``, or None.

        It is called again after each extra round, whose uploads go to `on_extra_round_end`. The bytes of an extra
        round are counted in the training round.

        Args:
            state: the state before the training round.
            sampled: the clients of the training round.
        """
        return None

    @property
    def extra_parts(self) -> list[tuple[LocalUpdate, Exchange | None]]:
        """The local updates and exchanges of its extra rounds, unless they are those of its warm-up or of the method.

        A client on a machine of its own runs no others.
        """
        return []

    def figures(self, state: FederationState) -> "dict[str, Figure]":
        """Returns figures by name. `Monitor` writes them once the warm-up rounds are over."""
        return {}

    def place_newcomer(self, newcomer: NewcomerInterface, state: FederationState) -> int:
        """Returns the cluster of a client that joins after the last round. Changes nothing.

        This default returns the cluster whose model has the smallest loss on the newcomer's training samples, and the
        lowest number in a tie. It needs only the models, so it works for every clustering. A clustering with another
        rule overrides this method and describes the rule in `newcomer_rule`.
        """
        losses = [inf if isnan(loss) else loss for loss in newcomer.losses(state.centres)]
        return losses.index(min(losses))


def check_num_clusters(clustering: Clustering, num_clusters: int | None, num_clients: int) -> None:
    """Checks that K is at most N if K is given.

    Raises:
        ValueError: if K is larger than N.
    """
    if num_clusters is not None and num_clusters > num_clients:
        raise ValueError(
            f"method.clustering: {type(clustering).__name__} got num_clusters={num_clusters} for the {num_clients} "
            "clients of the run (data.num_clients without newcomers); there can be at most one cluster per client. "
            "Lower num_clusters or raise data.num_clients."
        )
