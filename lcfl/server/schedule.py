"""How long a federation runs, how often it evaluates, and which clients take part in a round.

Legend: N clients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lcfl.core import rng
from lcfl.methods.exchange import Exchange, ModelKind

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """Length, intervals and participants of a run, as a pure function of seed and round.

    Attributes:
        rounds: total number of training rounds, which includes the rounds of a checkpoint.
        clients_per_round: |S_t|.
        evaluate_every: rounds between evaluations; 0 evaluates only at the end.
        most_clients: maximum number of clients in warm-up rounds and evaluations (``trainer.fast_dev_run``).
        client_dropout: probability that a sampled client does not report.
        final_models: kinds of model that the last evaluation measures in addition to the paper's; None for all.
        num_evaluated: number of clients that an evaluation measures; None for all.
        evaluate_models: kinds of model that every evaluation measures in addition to the paper's; None for all.
    """

    rounds: int
    clients_per_round: int
    evaluate_every: int
    most_clients: int | None = None
    client_dropout: float = 0.0
    final_models: Sequence[ModelKind] | None = None
    num_evaluated: int | None = None
    evaluate_models: Sequence[ModelKind] | None = ()

    def sample(self, seed: int, number: int, active_N: Tensor, full_participation: bool = False) -> list[int]:
        """Draws S_t of round `number`, ascending, uniformly without replacement and identically for every method.

        The draw is from all N clients. Clients outside the federation, i.e. newcomers and clients that have left, are
        then put back. The rest of the stream draws as many other clients in their place, as far as there are any. The
        other clients of the first draw stay drawn.

        Args:
            seed: seed of the run.
            number: t.
            active_N: mask of the clients that belong to the federation, bool.
            full_participation: whether the method has all clients take part in every round.
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

    def evaluated_kinds(self, exchange: Exchange, is_final: bool = False) -> list[ModelKind]:
        """Returns the kinds of model that an evaluation measures: first those that the method reports.

        Args:
            exchange: the method's exchange.
            is_final: whether it is an evaluation after training. It measures at least what every other one measures.
        """
        wanted = [self.evaluate_models, *([self.final_models] if is_final else [])]
        return [
            kind
            for kind in dict.fromkeys([*exchange.reported, *exchange.models])
            if kind in exchange.reported or any(kinds is None or kind in kinds for kinds in wanted)
        ]

    def sample_evaluated(self, seed: int, active_N: Tensor) -> list[int]:
        """Returns the clients that an evaluation measures, ascending.

        They are the same in every round, except that a client that leaves is replaced.

        Args:
            seed: seed of the run.
            active_N: mask of the clients that belong to the federation, bool.
        """
        active: list[int] = torch.nonzero(active_N).flatten().tolist()
        if self.num_evaluated is not None and self.num_evaluated < len(active):
            order = torch.from_numpy(rng.generator(seed, "evaluated clients").permutation(len(active_N)))
            active = sorted(order[active_N[order]][: self.num_evaluated].tolist())
        return active[: self.most_clients]

    def sample_dropouts(self, seed: int, number: int, sampled: Sequence[int]) -> set[int]:
        """Draws the clients of S_t that receive the server's message and never answer.

        Each client has a separate random stream.
        """
        if not self.client_dropout:
            return set()
        chances = {i: rng.generator(seed, "client dropout", number, i).random() for i in sampled}
        return {i for i, chance in chances.items() if chance < self.client_dropout}

    def most_uploads(
        self, seed: int, active: Callable[[int], Tensor], rounds: int, full_participation: bool = False
    ) -> int:
        """Returns how many training rounds the client that is drawn most often takes part in, among the first `rounds`.

        Args:
            seed: seed of the run.
            active: returns the mask ``[N]`` of the clients that belong to the federation in a round.
            rounds: number of training rounds.
            full_participation: whether the method has all clients take part in every round.
        """
        times_N = torch.zeros(len(active(0)), dtype=torch.int64)
        for number in range(rounds):
            times_N[self.sample(seed, number, active(number), full_participation)] += 1
        return int(times_N.max())
