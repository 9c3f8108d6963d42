"""The engine that trains all clients of a rank at once, for GPUs. In every operation the first dimension is the client.

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
from lcfl.data.spec import SampleSpec
from lcfl.engines.engine_requests import (
    ClientEngine,
    GradientRequest,
    OptimizerRequest,
    Request,
    ScoresRequest,
)
from lcfl.engines.forward_graph import Unsupported
from lcfl.engines.lockstep import Submit, run_in_lockstep
from lcfl.engines.sequential import SCORED_BATCH, SequentialEngine
from lcfl.engines.stacked_batches import StackedBatch, StackedBatches, look_up
from lcfl.engines.stacked_rows import RowMeans, Rows, at, give_gradient, joined, optimizer_of
from lcfl.engines.step_graphs import StepGraphs, StepResult, is_recordable, stack_size
from lcfl.engines.vmapped import Named, Probe, VmappedModule
from lcfl.methods.local.engine import Gradient, OptimizerResult
from lcfl.models.hooks import has_backward_hooks, has_parameter_hooks, has_step_hooks
from lcfl.models.metrics import ignore_index
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import Pulls

__all__ = ["StackedEngine", "check_stacked"]

ELEMENTWISE = (SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop)
MOST_CLIENTS = 256  # at once; more of them do not keep a GPU busier
GPU_SHARE = 0.5  # of all memory; a share of the free memory would make stacks, and so bits, depend on other programs
HOST_BYTES = 2 * 2**30
COPIES = 14  # of a model in training: weights, gradient, optimizer, targets of the pulls, start, result, and a graph's
ACTIVATIONS = 3  # what autograd keeps, its gradient, and a copy in another layout for a kernel

Result = TypeVar("Result")


def check_stacked(module: FederatedModule, spec: SampleSpec, precision: str = "32-true") -> Probe:
    """Checks that `StackedEngine` trains a module the way the module defines it.

    Args:
        module: network, loss and optimizer.
        spec: what one sample looks like.
        precision: the precision of a step's arithmetic.

    Returns:
        What a trial step on a CPU found out.

    Raises:
        Unsupported: if it does not, with the reason.
    """
    if precision == "16-mixed":
        raise Unsupported("16-mixed needs a loss scale for every client")
    if type(module).configure_optimizers is not FederatedModule.configure_optimizers:
        raise Unsupported(f"{type(module).__name__} defines its own configure_optimizers")
    optimizer = module.configure_optimizers()
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise Unsupported(f"the optimizer is {type(optimizer).__name__}, not one that works elementwise ({known})")
    if has_step_hooks(optimizer):
        raise Unsupported("the optimizer has hooks or a step of its own")
    if any(map(has_backward_hooks, module.modules())) or any(map(has_parameter_hooks, module.parameters())):
        raise Unsupported("the network has hooks for its backward pass")
    for layer in module.network.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            is_plain = isinstance(layer, nn.Embedding) and not layer.weight.requires_grad  # only max_norm has an effect
            names = ("max_norm",) if is_plain else ("padding_idx", "max_norm", "sparse")
            options = {name: getattr(layer, name) for name in names}
            if given := [name for name, value in options.items() if value is not None and value is not False]:
                raise Unsupported(f"torch.vmap does not follow {given[0]} of its {type(layer).__name__}")
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        return VmappedModule(module.replica()).trial(spec, torch.device("cpu"))


class StackedEngine(SequentialEngine):
    """Runs the tasks of several clients side by side and computes all their requests at once.

    Each task gets a `ClientEngine` instead of this engine. Where several wait for the same kind of computation, their
    models are stacked to ``[C, P + Q]``, the module's own `training_step` is mapped over them, and one optimizer steps
    on all of them. Shorter batches are padded with samples that the loss ignores. Where padding would change the
    result, as with batch normalisation, batches of each size are computed separately. The engine agrees with
    `SequentialEngine` up to rounding, which depends on which clients are stacked together.

    If it is called directly and not through `run_all`, it is the sequential engine.

    Args:
        fabric: gives device and precision.
        module: one that `check_stacked` accepts; its `training_step` must keep nothing from one call to the next.
        samples: the pool that batches are gathered from.
        spec: what one sample looks like.
        batch_size: the batch size of most steps.
        max_steps: cuts every local run after so many steps (``trainer.fast_dev_run``).
        budget: bytes for the clients that train at once; None means half of a GPU's memory, divided by the ranks that
            share the GPU, or 2 GiB on a CPU.

    Attributes:
        batches: gathers the batches of the clients that train at once.
        most_clients: the largest number of these clients.
    """

    def __init__(
        self,
        fabric: Fabric,
        module: FederatedModule,
        samples: Samples,
        spec: SampleSpec,
        batch_size: int,
        max_steps: int | None = None,
        budget: int | None = None,
    ) -> None:
        super().__init__(fabric, module, samples, max_steps)
        self._mapped = VmappedModule(self.module)
        with fabric.autocast():
            trial = self._mapped.trial(spec, self.device)
        ignored = ignore_index(module.loss) if trial.ignores_padding else None
        self.batches = StackedBatches(self.device, batch_size, spec.blank(1)[0].nbytes, ignored)
        self._sample_bytes = ACTIVATIONS * trial.sample_bytes
        self._budget = _bytes_for_clients(fabric) if budget is None else budget
        client_bytes = 4 * COPIES * self.layout.size + batch_size * self._sample_bytes
        self.most_clients = max(1, min(MOST_CLIENTS, self._budget // client_bytes))
        self._graphs, self._shape = None, spec.shape
        if self.device.type == "cuda" and is_recordable(self.module):
            self._graphs = StepGraphs()
            self.most_clients = next(n for n in range(self.most_clients, 0, -1) if stack_size(n) <= self.most_clients)

    def run_all(self, tasks: Sequence[Callable[[SequentialEngine], Result]]) -> list[Result]:
        """See `SequentialEngine.run_all`."""
        results: list[Result] = []
        for start in range(0, len(tasks), self.most_clients):
            part = [partial(self._run_task, task) for task in tasks[start : start + self.most_clients]]
            results += run_in_lockstep(part, self._answer)
        return results

    def _run_task(self, task: Callable[[SequentialEngine], Result], submit: Submit) -> Result:
        return task(ClientEngine(self, submit))

    def _answer(self, requests: Sequence[Request]) -> list[Any]:
        """Returns the answers in the order of the requests. Requests of one kind are computed at once."""
        kinds: dict[Hashable, list[int]] = {}
        for position, request in enumerate(requests):
            kinds.setdefault(request.kind(by_size=self.batches.ignored is None), []).append(position)
        answers: list[Any] = [None] * len(requests)
        for positions in kinds.values():
            alike = self._answer_alike([requests[each] for each in positions])
            for position, answer in zip(positions, alike, strict=True):
                answers[position] = answer
        return answers

    def _answer_alike(self, requests: Sequence[Any]) -> list[Any]:
        """Returns the answers to requests of one kind.

        After an exception it tries each half by itself, until the exception is the answer to a single client.
        """
        try:
            if isinstance(requests[0], OptimizerRequest):
                return self._descend(requests)
            is_gradient = isinstance(requests[0], GradientRequest)
            return self._differentiate_all(requests) if is_gradient else self._score(requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
        half = len(requests) // 2
        return [*self._answer_alike(requests[:half]), *self._answer_alike(requests[half:])]

    def _descend(self, requests: Sequence[OptimizerRequest]) -> list[OptimizerResult]:
        """Runs the optimizer of all clients, step by step; each step computes the clients that have one left.

        A client that has finished is copied out. The optimizer treats every parameter by itself, so it may continue
        to change the rows of finished clients.
        """
        clients = [request.client for request in requests]
        parameters, buffers = self._open([request.start for request in requests], clients)
        targets = self._pulls(requests)
        for name in parameters.keys() - self.layout.names_of(requests[0].part):
            parameters[name].requires_grad_(False)  # without a gradient, the optimizer leaves it as it is
        optimizer = optimizer_of(self.module, parameters)
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * requests[0].rate_scale
        is_fused = any(group.get("fused") for group in optimizer.param_groups)  # reads strides of weights alone
        ends = torch.empty(len(requests), self.layout.num_parameters, device=self.device)
        losses, logged = RowMeans(len(requests), self.device), RowMeans(len(requests), self.device)
        for number, groups in enumerate(self.batches.of_steps(requests)):
            optimizer.zero_grad()
            for members, batch in groups:
                rows = self._rows(members, len(requests))
                pulls = Pulls._make(None if each is None else each[rows] for each in targets)
                slopes, output = self._step(at(parameters, rows), at(buffers, rows), batch, number, pulls)
                for name, slope in slopes.items():
                    give_gradient(parameters[name], rows, slope.contiguous() if is_fused else slope)
                for name, values in output.buffers.items():
                    buffers[name][rows] = values
                losses.add(rows, {"loss": output.losses[:, None]})
                logged.add(rows, output.logged)
            optimizer.step()
            finished = [row for row, request in enumerate(requests) if len(request.batches) == number + 1]
            if finished:
                rows = self._rows(finished, len(requests))
                ends[rows] = joined(at(parameters, rows))
        if buffers:
            final = joined(buffers)
            for client, own in zip(clients, final, strict=True):
                client.keep(own)
            ends = torch.cat([ends, final], dim=1)
        means = zip(ends[:, : self.layout.size], losses.by_row(), logged.by_row(), strict=True)
        # A view would keep the models of all clients in memory.
        return [OptimizerResult(model.to("cpu", copy=True), loss["loss"], values) for model, loss, values in means]

    def _differentiate_all(self, requests: Sequence[GradientRequest]) -> list[Gradient]:
        """Returns gradients, or their derivatives along the directions, and the forward passes' other outputs."""
        clients = [request.client for request in requests]
        parameters, buffers = self._open([request.model for request in requests], clients)
        batch = self.batches.gather(clients, [request.batch for request in requests])
        along = [request.direction for request in requests if request.direction is not None]
        directions = self._stack(along) if along else None
        number = requests[0].number
        if directions is None:
            slopes, output = self._step(parameters, buffers, batch, number, self._pulls(requests))
        else:
            slopes, output = self._hessian_products(parameters, buffers, batch, number, directions)
        vectors = joined({name: slopes.get(name, torch.zeros_like(each)) for name, each in parameters.items()})
        updated = joined(output.buffers) if output.buffers else vectors[:, :0]
        if output.buffers and directions is None:
            for client, own in zip(clients, updated, strict=True):
                client.keep(own)
        updated = updated[:, : self.layout.size - self.layout.num_parameters]
        logged = {name: values.mean(1) for name, values in output.logged.items()}
        return [
            Gradient(
                vectors[row].to(request.model.device),
                updated[row].to(request.model.device),
                output.losses[row],
                {name: values[row] for name, values in logged.items()},
            )
            for row, request in enumerate(requests)
        ]

    def _step(self, parameters: Named, buffers: Named, batch: StackedBatch, number: int, pulls: Pulls) -> StepResult:
        """Returns the gradients of a training step, ``[C, ...]`` by name, and its other outputs.

        On a GPU the next step may overwrite gradients and buffers.
        """
        missing, is_usual = self.batches.batch_size - batch[1].shape[1], batch[0].shape[2:] == self._shape
        cannot_pad = missing < 0 or (missing > 0 and self.batches.ignored is None)
        if self._graphs is None or not is_usual or cannot_pad:
            return self._kernels(parameters, buffers, *batch, pulls, number)
        padded = self.batches.lengthened(*batch) if missing else batch
        return self._graphs(self._kernels, parameters, buffers, *padded, pulls)

    def _kernels(
        self, parameters: Named, buffers: Named, inputs: Tensor, targets: Tensor, pulls: Pulls, number: int = 0
    ) -> StepResult:
        with self.fabric.autocast():
            output = self._mapped.step(parameters, buffers, inputs, targets, number, pulls)
        return _slopes(output.losses.sum(), parameters), output._replace(losses=output.losses.detach())

    def _hessian_products(
        self, parameters: Named, buffers: Named, batch: StackedBatch, number: int, directions: Tensor
    ) -> StepResult:
        """Returns the derivatives of the gradients along the directions ``[C, P]``, and a step's other outputs."""
        with self.fabric.autocast():
            output = self._mapped.step(parameters, buffers, *batch, number)
        slopes = _slopes(output.losses.sum(), parameters, create_graph=True)
        along = self._mapped.parameters(directions)
        product = sum(((slopes[name] * along[name]).sum() for name in slopes), torch.tensor(0.0))
        return _slopes(product, parameters), output._replace(losses=output.losses.detach())

    @torch.no_grad()
    def _score(self, requests: Sequence[ScoresRequest]) -> list[tuple[Tensor, Tensor]]:
        """Returns scores and labels. If all models score the same samples, each batch is gathered once."""
        parameters, buffers = self._open(
            [request.model for request in requests], [request.client for request in requests]
        )
        first = requests[0]
        shared = all(each.samples is first.samples and np.array_equal(each.indices, first.indices) for each in requests)
        results: list[list[tuple[Tensor, Tensor]]] = [[] for _ in requests]
        at_a_time = max(1, min(SCORED_BATCH, self._budget // (len(requests) * self._sample_bytes)))
        for start in range(0, max(len(request.indices) for request in requests), at_a_time):
            members = [row for row, request in enumerate(requests) if len(request.indices) > start]
            rows = self._rows(members, len(requests))
            parts = [requests[row].indices[start : start + at_a_time] for row in members]
            if shared:
                inputs, own = first.samples.batch(parts[0], self.device)
                targets = own.expand(len(members), *own.shape)
            else:
                inputs, targets = look_up([requests[row].samples for row in members], parts, self.device)
            with self.fabric.autocast():
                scores = self._mapped.scores(at(parameters, rows), at(buffers, rows), inputs, shared)
            for row, part, of_row, labels in zip(members, parts, scores, targets, strict=True):
                results[row].append((of_row[: len(part)], labels[: len(part)]))
        columns = (zip(*parts, strict=True) for parts in results)
        return [(torch.cat(scores), torch.cat(targets)) for scores, targets in columns]

    def _rows(self, members: Sequence[int], size: int) -> Rows:
        return slice(None) if len(members) == size else torch.tensor(members, dtype=torch.int64, device=self.device)

    def _open(self, models: Sequence[Tensor], clients: Sequence[ClientEngine]) -> tuple[Named, Named]:
        """Stacks the parameters and the buffers of models ``[P + Q]``."""
        stacked = self._stack(models)
        if (apart := self.module.buffer_layout) is None:
            return self._mapped.parameters(stacked), self._mapped.buffers(stacked[:, self.layout.num_parameters :])
        first = apart.pack(self.module.network)
        own = self._stack([first if client.buffers is None else client.buffers for client in clients])
        return self._mapped.parameters(stacked), self._mapped.buffers(own)

    def _stack(self, vectors: Sequence[Tensor]) -> Tensor:
        """Stacks vectors as the rows of a matrix on the device. Vectors in the same memory are transferred once."""
        numbers: dict[tuple[int, int], int] = {}
        rows = [numbers.setdefault((each.data_ptr(), len(each)), len(numbers)) for each in vectors]
        distinct = torch.empty(len(numbers), len(vectors[0]), device=self.device)
        for number, row in enumerate(distinct):
            row.copy_(vectors[rows.index(number)])
        return distinct if len(distinct) == len(rows) else distinct[torch.tensor(rows, device=self.device)]

    def _pulls(self, requests: Sequence[OptimizerRequest] | Sequence[GradientRequest]) -> Pulls:
        pulls = [request.pulls for request in requests]
        centres = [each.centre[: self.layout.num_parameters] for each in pulls if each.centre is not None]
        embeddings = [each.embedding for each in pulls if each.embedding is not None]
        corrections = [each.correction for each in pulls if each.correction is not None]
        return Pulls(
            self._stack(centres) if centres else None,  # also with weights of 0: a term of the user's may read them
            self._stack(embeddings) if embeddings else None,
            self._stack(corrections) if corrections else None,
        )


def _slopes(loss: Tensor, parameters: Named, create_graph: bool = False) -> Named:
    """Returns d loss / d parameter ``[C, ...]`` by name, for the parameters that take part and require a gradient."""
    trained = {name: each for name, each in parameters.items() if each.requires_grad}
    slopes = torch.autograd.grad(loss, list(trained.values()), create_graph=create_graph, allow_unused=True)
    return {name: slope for name, slope in zip(trained, slopes, strict=True) if slope is not None}


def _bytes_for_clients(fabric: Fabric) -> int:
    """Returns the bytes that a stack may use. The rest is for kernels' workspaces, which the estimate leaves out."""
    device = fabric.device
    if device.type != "cuda":
        return HOST_BYTES
    ranks = getattr(fabric.strategy, "parallel_devices", None) or [device]
    return int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory / ranks.count(device))
