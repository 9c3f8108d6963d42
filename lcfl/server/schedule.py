"""How long a federation runs, how often what happens, and who takes part in a round.

Legend: N clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lcfl.core import rng
from lcfl.methods.exchange import ModelKind
from lcfl.methods.exchange.transforms import Releases

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """How long, how often, and who: a pure function of seed and round.

    Attributes:
        rounds: in all, not in addition to those of a checkpoint.
        clients_per_round: |S_t|.
        evaluate_every: rounds between evaluations; 0 for the one at the end only.
        most_clients: cuts warm-up rounds and evaluations (``trainer.fast_dev_run``).
        client_dropout: the chance that a sampled client does not report.
        final_models: the kinds of model that the last evaluation measures beside the paper's; None for all.
        num_evaluated: how many clients an evaluation measures; None for all.
    """

    rounds: int
    clients_per_round: int
    evaluate_every: int
    most_clients: int | None = None
    client_dropout: float = 0.0
    final_models: Sequence[ModelKind] | None = None
    num_evaluated: int | None = None

    def sample(self, seed: int, number: int, active_N: Tensor, full_participation: bool = False) -> list[int]:
        """S_t of round `number`, ascending: drawn uniformly without replacement, the same for every method.

        Drawn from all N. Clients outside of the federation, newcomers and those that have left, are then put back,
        and as many others, as far as there are any, are drawn in their place from the rest of the stream: whoever
        else was drawn stays drawn.

        Args:
            seed: of the run.
            number: t.
            active_N: who belongs to the federation, bool.
            full_participation: the method has all clients take part in every round.
        """
        if full_participation:
            clients: list[int] = torch.nonzero(active_N).flatten().tolist()
            return clients[: self.most_clients]
        draw = rng.generator(seed, "sample", number)
        chosen = draw.choice(len(active_N), self.clients_per_round, replace=False).tolist()
        sampled = [client for client in chosen if active_N[client]]
        if len(sampled) < len(chosen):
            others = torch.from_numpy(draw.permutation(len(active_N)))
            is_other = active_N.clone()
            is_other[sampled] = False
            sampled += others[is_other[others]][: len(chosen) - len(sampled)].tolist()
        return sorted(sampled)

    def evaluated(self, seed: int, active_N: Tensor) -> list[int]:
        """The clients that an evaluation measures, ascending: the same ones in every round; who leaves is replaced.

        Args:
            seed: of the run.
            active_N: who belongs to the federation, bool.
        """
        active: list[int] = torch.nonzero(active_N).flatten().tolist()
        if self.num_evaluated is not None and self.num_evaluated < len(active):
            order = torch.from_numpy(rng.generator(seed, "evaluated clients").permutation(len(active_N)))
            active = sorted(order[active_N[order]][: self.num_evaluated].tolist())
        return active[: self.most_clients]

    def dropped(self, seed: int, number: int, sampled: Sequence[int]) -> set[int]:
        """Those of S_t that get the server's message and never answer; each by a stream of its own."""
        if not self.client_dropout:
            return set()
        chances = {i: rng.generator(seed, "client dropout", number, i).random() for i in sampled}
        return {i for i, chance in chances.items() if chance < self.client_dropout}

    def releases(self, num_clients: int, rounds: int | None = None) -> Releases:
        """How often clients upload in so many training rounds, in all of them if None.

        Args:
            num_clients: who may be drawn; the fewest of any round, which never understates a client's chance.
            rounds: training rounds.
        """
        sampled = min(self.clients_per_round, num_clients)
        return Releases(self.rounds if rounds is None else rounds, sampled, num_clients)
