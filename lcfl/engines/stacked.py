"""The engine that trains the clients of a rank at once, for GPUs: every operation has them as its first dimension.

Legend: C clients at once, P parameters and Q buffer entries in a model's flat vector, B batch size.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop

from lcfl.data.samples import Samples
from lcfl.engines.lockstep import Ask, run_in_lockstep
from lcfl.engines.requests import (
    Batch,
    ClientEngine,
    GradientRequest,
    OptimizerRequest,
    Request,
    ScoresRequest,
    length_of,
)
from lcfl.engines.sequential import SCORED_BATCH, SequentialEngine
from lcfl.engines.stacks import RowMeans, Rows, at, filled_up, give_gradient, joined, optimizer_of
from lcfl.engines.tracing import Unsupported
from lcfl.engines.vmapped import Named, Probe, StepOutput, VmappedModule
from lcfl.methods.local.engine import Gradient, Indices, OptimizerRun
from lcfl.models.module import FederatedModule

__all__ = ["Pulls", "StackedEngine", "check_stacked"]

ELEMENTWISE = (SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop)
MOST_CLIENTS = 256  # at once: more keep no GPU busier
GPU_SHARE = 0.5  # of its memory, not of what is free now: that would decide about stacks, and so about bits
HOST_BYTES = 2 * 2**30
COPIES = 10  # of a model in training: weights, gradient, optimizer, what it is pulled to, what it was and becomes
ACTIVATIONS = 3  # what autograd keeps, its gradient, and a kernel's other layout of it

Result = TypeVar("Result")
Pulls = tuple[Tensor | None, Tensor | None]  # Omega [C, P] and Phi [C, P_phi], None where nothing pulls


def check_stacked(
    module: FederatedModule, shape: Sequence[int], dtype: torch.dtype, precision: str = "32-true"
) -> Probe:
    """Makes sure that `StackedEngine` trains a module as it wants to be trained; what a step on a CPU found out.

    Args:
        module: network, loss and optimizer.
        shape: of one input of the network.
        dtype: of the inputs.
        precision: of a step's arithmetic.

    Raises:
        Unsupported: if it does not; says why.
    """
    if precision == "16-mixed":
        raise Unsupported("16-mixed needs a loss scale for every client")
    if type(module).configure_optimizers is not FederatedModule.configure_optimizers:
        raise Unsupported(f"{type(module).__name__} has a configure_optimizers of its own")
    optimizer = type(module.configure_optimizers())
    if optimizer not in ELEMENTWISE:
        known = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise Unsupported(f"the optimizer is {optimizer.__name__}, not one that acts on every number alone ({known})")
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        return VmappedModule(module).trial(shape, dtype, torch.device("cpu"))


class StackedEngine(SequentialEngine):
    """Runs the tasks of several clients side by side and computes at once what all of them ask for.

    Each task gets a `ClientEngine` instead of this engine. Where several wait for the same kind of computation, their
    models are stacked to ``[C, P + Q]``, the module's own `training_step` is mapped over them, and one optimizer steps
    on all of them. Shorter batches are padded with samples that the loss ignores. Where padding would change the
    result, as with batch normalisation, batches of each size are computed separately. The engine agrees with
    `SequentialEngine` up to rounding, which depends on which clients are stacked together.

    Asked directly, and not through `run_all`, it is the sequential engine.

    Args:
        fabric: gives device and precision.
        module: one that `check_stacked` accepts; its `training_step` must keep nothing from one call to the next.
        samples: the pool that batches are gathered from.
        shape: of one input of the network.
        dtype: of the inputs.
        batch_size: of most steps.
        max_steps: cuts every local run after so many steps (``trainer.fast_dev_run``).
        budget: bytes for the clients that are at work at once; None: half of a GPU's memory, 2 GiB on a CPU.

    Attributes:
        most_clients: how many are at work at once at most.
    """

    def __init__(
        self,
        fabric: Fabric,
        module: FederatedModule,
        samples: Samples,
        shape: Sequence[int],
        dtype: torch.dtype,
        batch_size: int,
        max_steps: int | None = None,
        budget: int | None = None,
    ) -> None:
        super().__init__(fabric, module, samples, max_steps)
        self._mapped, self._batch_size = VmappedModule(self.module), batch_size
        with fabric.autocast():
            trial = self._mapped.trial(shape, dtype, self.device)
        self._fills_up, self._sample_bytes = trial.fills_up, ACTIVATIONS * trial.sample_bytes
        self._budget = _bytes_for_clients(self.device) if budget is None else budget
        client_bytes = 4 * COPIES * self.layout.size + batch_size * self._sample_bytes
        self.most_clients = max(1, min(MOST_CLIENTS, self._budget // client_bytes))

    def run_all(self, works: Sequence[Callable[[SequentialEngine], Result]]) -> list[Result]:
        """See `SequentialEngine.run_all`."""
        found: list[Result] = []
        for start in range(0, len(works), self.most_clients):
            part = [partial(self._seated, work) for work in works[start : start + self.most_clients]]
            found += run_in_lockstep(part, self._answer)
        return found

    def _seated(self, work: Callable[[SequentialEngine], Result], ask: Ask) -> Result:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # every thread has its own
        return work(ClientEngine(self, ask))

    def _answer(self, questions: Sequence[Request]) -> list[Any]:
        """The answers in the order of the questions; those of one kind are found at once."""
        kinds: dict[Hashable, list[int]] = {}
        for place, question in enumerate(questions):
            kinds.setdefault(question.kind(by_size=not self._fills_up), []).append(place)
        answers: list[Any] = [None] * len(questions)
        for places in kinds.values():
            for place, answer in zip(places, self._answer_alike([questions[each] for each in places]), strict=True):
                answers[place] = answer
        return answers

    def _answer_alike(self, asked: Sequence[Any]) -> list[Any]:
        """Answers to questions of one kind; after an exception to each half alone, until it is one client's answer."""
        try:
            if isinstance(asked[0], OptimizerRequest):
                return self._descend(asked)
            return self._differentiate_all(asked) if isinstance(asked[0], GradientRequest) else self._score(asked)
        except Exception as error:
            if len(asked) == 1:
                return [error]
        half = len(asked) // 2
        return [*self._answer_alike(asked[:half]), *self._answer_alike(asked[half:])]

    def _descend(self, asked: Sequence[OptimizerRequest]) -> list[OptimizerRun]:
        """Step after step of those who have one left.

        Whoever has finished is copied out; the optimizer, which acts on every number alone, goes on over the row.
        """
        seats = [each.client for each in asked]
        parameters, buffers = self._open([each.start for each in asked], seats)
        centre, embedding = self._pulls(asked)
        optimizer = optimizer_of(self.module, parameters)
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * asked[0].rate_scale
        ends = torch.empty(len(asked), self.layout.num_parameters, device=self.device)
        losses, logged = RowMeans(len(asked), self.device), RowMeans(len(asked), self.device)
        for number in range(max(len(each.batches) for each in asked)):
            optimizer.zero_grad()
            for members in self._groups(asked, number):
                rows = self._rows(members, len(asked))
                batch = self._gather(
                    [seats[each] for each in members], [asked[each].batches[number] for each in members]
                )
                pulls = _row(centre, rows), _row(embedding, rows)
                slopes, found = self._step(at(parameters, rows), at(buffers, rows), batch, number, pulls)
                for name, slope in slopes.items():
                    give_gradient(parameters[name], rows, slope)
                for name, kept in found.buffers.items():
                    buffers[name][rows] = kept
                losses.add(rows, {"loss": found.losses[:, None]})
                logged.add(rows, found.logged)
            optimizer.step()
            finished = [row for row, each in enumerate(asked) if len(each.batches) == number + 1]
            if finished:
                rows = self._rows(finished, len(asked))
                ends[rows] = joined(at(parameters, rows))
        if buffers:
            kept = joined(buffers)
            for client, own in zip(seats, kept, strict=True):
                client.keep(own)
            ends = torch.cat([ends, kept], dim=1)
        models = ends[:, : self.layout.size].cpu()
        return [
            OptimizerRun(model.clone(), loss["loss"], values)  # a view would keep all of them
            for model, loss, values in zip(models, losses.by_row(), logged.by_row(), strict=True)
        ]

    def _differentiate_all(self, asked: Sequence[GradientRequest]) -> list[Gradient]:
        """Gradients, or their derivatives along the directions, with what else the forward passes gave."""
        seats = [each.client for each in asked]
        parameters, buffers = self._open([each.model for each in asked], seats)
        batch = self._gather(seats, [each.batch for each in asked])
        along = [each.direction for each in asked if each.direction is not None]
        directions = self._stack(along) if along else None
        slopes, found = self._step(parameters, buffers, batch, asked[0].number, self._pulls(asked), directions)
        vectors = joined({name: slopes.get(name, torch.zeros_like(each)) for name, each in parameters.items()})
        kept = joined(found.buffers) if found.buffers else vectors[:, :0]
        if found.buffers and directions is None:
            for client, own in zip(seats, kept, strict=True):
                client.keep(own)
        kept = kept[:, : self.layout.size - self.layout.num_parameters]
        logged = {name: values.mean(1) for name, values in found.logged.items()}
        return [
            Gradient(
                vectors[row].to(each.model.device),
                kept[row].to(each.model.device),
                found.losses[row],
                {name: values[row] for name, values in logged.items()},
            )
            for row, each in enumerate(asked)
        ]

    def _step(
        self,
        parameters: Named,
        buffers: Named,
        batch: tuple[Tensor, Tensor],
        number: int,
        pulls: Pulls,
        directions: Tensor | None = None,
    ) -> tuple[Named, StepOutput]:
        """The gradients of a training step, ``[C, ...]`` by name, and what else it gave.

        With directions ``[C, P]`` the gradients' derivatives along these, in place of the gradients.
        """
        with self.fabric.autocast():
            found = self._mapped.step(parameters, buffers, *batch, number, *pulls)
        slopes = _slopes(found.losses.sum(), parameters, create_graph=directions is not None)
        if directions is not None:
            along = self._mapped.parameters(directions)
            product = sum(((slopes[name] * along[name]).sum() for name in slopes), torch.tensor(0.0))
            slopes = _slopes(product, parameters)
        return slopes, found._replace(losses=found.losses.detach())

    @torch.no_grad()
    def _score(self, asked: Sequence[ScoresRequest]) -> list[tuple[Tensor, Tensor]]:
        """Scores and labels; of images that all models look at alike a batch is gathered once."""
        parameters, buffers = self._open([each.model for each in asked], [each.client for each in asked])
        first = asked[0]
        shared = all(each.samples is first.samples and np.array_equal(each.indices, first.indices) for each in asked)
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in asked]
        at_a_time = max(1, min(SCORED_BATCH, self._budget // (len(asked) * self._sample_bytes)))
        for start in range(0, max(len(each.indices) for each in asked), at_a_time):
            members = [number for number, each in enumerate(asked) if len(each.indices) > start]
            rows = self._rows(members, len(asked))
            parts = [asked[each].indices[start : start + at_a_time] for each in members]
            if shared:
                inputs, labels = first.samples.batch(parts[0], self.device)
                targets = labels.expand(len(members), -1)
            else:
                inputs, targets = self._look_up([asked[each].samples for each in members], parts)
            with self.fabric.autocast():
                scores = self._mapped.scores(at(parameters, rows), at(buffers, rows), inputs, shared)
            for each, part, of_each, labels in zip(members, parts, scores, targets, strict=True):
                found[each].append((of_each[: len(part)], labels[: len(part)]))
        columns = (zip(*parts, strict=True) for parts in found)
        return [(torch.cat(scores), torch.cat(targets)) for scores, targets in columns]

    def _groups(self, asked: Sequence[OptimizerRequest], number: int) -> list[list[int]]:
        """Who takes step `number`, in groups that are computed at once."""
        groups: dict[int, list[int]] = {}
        for row, each in enumerate(asked):
            if number < len(each.batches):
                size = 0 if self._fills_up else length_of(each.batches[number])
                groups.setdefault(size, []).append(row)
        return list(groups.values())

    def _rows(self, members: Sequence[int], size: int) -> Rows:
        return slice(None) if len(members) == size else torch.tensor(members, dtype=torch.int64, device=self.device)

    def _open(self, models: Sequence[Tensor], seats: Sequence[ClientEngine]) -> tuple[Named, Named]:
        """Parameters and buffers of models ``[P + Q]``, stacked."""
        stacked = self._stack(models)
        if (apart := self.module.buffer_layout) is None:
            return self._mapped.parameters(stacked), self._mapped.buffers(stacked[:, self.layout.num_parameters :])
        first = apart.pack(self.module.network)
        own = self._stack([first if client.buffers is None else client.buffers for client in seats])
        return self._mapped.parameters(stacked), self._mapped.buffers(own)

    def _stack(self, vectors: Sequence[Tensor]) -> Tensor:
        """Vectors as the rows of a matrix on the device; what is the same memory travels once."""
        numbers: dict[tuple[int, int], int] = {}
        places = [numbers.setdefault((each.data_ptr(), len(each)), len(numbers)) for each in vectors]
        distinct = torch.stack([vectors[places.index(number)] for number in range(len(numbers))]).to(self.device)
        return distinct if len(distinct) == len(places) else distinct[torch.tensor(places, device=self.device)]

    def _pulls(self, asked: Sequence[OptimizerRequest] | Sequence[GradientRequest]) -> Pulls:
        centres = [each.centre[: self.layout.num_parameters] for each in asked if each.centre is not None]
        embeddings = [each.embedding for each in asked if each.embedding is not None]
        centre = self._stack(centres) if centres and self.module.cluster_weight > 0 else None
        return centre, self._stack(embeddings) if embeddings and self.module.global_weight > 0 else None

    def _gather(self, seats: Sequence[ClientEngine], batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Inputs ``[C, B, ...]`` and labels ``[C, B]`` of a step; ignored samples fill shorter batches up."""
        sizes = [length_of(batch) for batch in batches]
        longest = max(sizes)
        drawn = [batch for batch in batches if isinstance(batch, tuple)]
        if drawn:
            inputs = torch.stack([filled_up(images, longest) for images, _ in drawn])
            targets = torch.stack([filled_up(labels, longest) for _, labels in drawn])
        else:
            positions = [batch for batch in batches if not isinstance(batch, tuple)]
            inputs, targets = self._look_up([client.samples for client in seats], positions, training=True)
        if min(sizes) < longest:
            assert isinstance(self.module.loss, nn.CrossEntropyLoss), "else they are grouped by size"
            beyond = torch.arange(longest) >= torch.tensor(sizes)[:, None]
            targets = targets.masked_fill(beyond.to(self.device), self.module.loss.ignore_index)
        return inputs, targets

    def _look_up(
        self, samples: Sequence[Samples], indices: Sequence[Indices], training: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Inputs ``[C, n, ...]`` and labels ``[C, n]``, n the most indices; the first of the others fills them up."""
        places = np.empty((len(indices), max(map(len, indices))), dtype=np.int64)
        for row, each in zip(places, indices, strict=True):
            row[: len(each)], row[len(each) :] = each, each[0]
        looks = [each.training_batch if training else each.batch for each in samples]
        if all(each is samples[0] for each in samples):
            inputs, targets = looks[0](places.reshape(-1), self.device)
            return inputs.unflatten(0, places.shape), targets.unflatten(0, places.shape)
        found = [look(row, self.device) for look, row in zip(looks, places, strict=True)]
        return torch.stack([inputs for inputs, _ in found]), torch.stack([targets for _, targets in found])


def _row(stacked: Tensor | None, rows: Rows) -> Tensor | None:
    return None if stacked is None else stacked[rows]


def _slopes(loss: Tensor, parameters: Named, create_graph: bool = False) -> Named:
    """d loss / d parameter ``[C, ...]`` of those that are trained and take part, by name."""
    trained = {name: each for name, each in parameters.items() if each.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), create_graph=create_graph, allow_unused=True)
    return {name: slope for name, slope in zip(trained, found, strict=True) if slope is not None}


def _bytes_for_clients(device: torch.device) -> int:
    """What a stack may take; the rest is for the workspaces of kernels, which the estimate does not know."""
    if device.type != "cuda":
        return HOST_BYTES
    return int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
