"""Training steps and scores of several models at once, by torch.vmap.

Legend: C models, P parameters and Q buffer entries of each, B batch size.
"""

import pickle
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lcfl.core import rng
from lcfl.data.spec import SampleSpec
from lcfl.engines.forward_graph import Unsupported
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import NO_PULLS, Pulls
from lcfl.models.step_loss import check_gradient, loss_of_step

__all__ = ["StepOutput", "VmappedModule", "Named", "Probe"]

Named = dict[str, Tensor]

SAMPLES = 3  # in a trial
NEAR = 0.05  # what the weights of its models differ by, at most, for one input
SCALARS = (int, float, complex, str, bytes, type(None))  # bool is an int
APART = 1e-3  # more than float32 sums differ by if only their order changes, also in TF32


class StepOutput(NamedTuple):
    """The outputs of the models' training steps: losses ``[C]``, logged values ``[C, times]`` by name, buffers."""

    losses: Tensor
    logged: Named
    buffers: Named


class Probe(NamedTuple):
    """The findings of a trial.

    Attributes:
        ignores_padding: whether batches may be padded with samples whose label is the loss's ``ignore_index``, which
            change nothing for the other samples.
        sample_bytes: the bytes that autograd keeps for one sample, including the sample.
    """

    ignores_padding: bool
    sample_bytes: int


class VmappedModule:
    """Computes `module.training_step` and `module.forward` for C models, whose tensors have C as the first dimension.

    Args:
        module: the module, whose own parameters and buffers are not changed. All models use those that are frozen.
    """

    def __init__(self, module: FederatedModule) -> None:
        self.module = module
        self._step = _Step(module)
        self._names = _names_of(module.network)
        dtypes = {name: buffer.dtype for name, buffer in module.network.named_buffers()}
        alone = module.layout.split_buffers()[1] if module.buffer_layout is None else module.buffer_layout
        self._buffers = [(name, shape, alone.places[name], dtypes[name]) for name, shape, _ in alone.buffers]

    def parameters(self, models: Tensor) -> Named:
        """Copies the parameters in models ``[C, P + ...]``, by name. They require gradients."""
        parameters, layout = {}, self.module.layout
        for name, shape in layout.parameters:
            part = models[:, layout.places[name]].reshape(-1, *shape)
            parameters[name] = part.clone(memory_format=torch.contiguous_format).requires_grad_()
        return parameters

    def buffers(self, vectors: Tensor) -> Named:
        """Copies the buffers in vectors ``[C, Q]``, by name."""
        buffers = {}
        for name, shape, place, dtype in self._buffers:
            part = vectors[:, place].reshape(-1, *shape)
            buffers[name] = part.to(dtype, copy=True, memory_format=torch.contiguous_format)
        return buffers

    def step(
        self,
        parameters: Named,
        buffers: Named,
        inputs: Tensor,
        targets: Tensor,
        number: int = 0,
        pulls: Pulls = NO_PULLS,
    ) -> StepOutput:
        """Runs the training step of every model on its batch. Gradients flow to `parameters`.

        Args:
            parameters: ``[C, ...]`` each.
            buffers: ``[C, ...]`` each; may be changed.
            inputs: ``[C, B, ...]``.
            targets: ``[C, B, ...]``.
            number: the number of the step.
            pulls: Omega ``[C, P]``, Phi ``[C, P_phi]`` and a correction ``[C, P]``.
        """
        module = self.module.train()

        def one(parameters: Named, buffers: Named, pulls: Pulls, inputs: Tensor, targets: Tensor) -> StepOutput:
            module.pulls = pulls
            tensors = self._placed("module.network", parameters, buffers)
            with module.collecting() as logged:
                loss = functional_call(self._step, tensors, ((inputs, targets), number), tie_weights=False)
            # `functional_call` puts a buffer that the network replaces into its dictionary.
            updated = {name: tensors[f"module.network.{name}"] for name in buffers}
            numbers = {name: torch.stack([each.reshape(()) for each in values]) for name, values in logged.items()}
            return StepOutput(loss.reshape(()), {name: each.float() for name, each in numbers.items()}, updated)

        dims = Pulls._make(None if each is None else 0 for each in pulls)
        mapped = torch.vmap(one, in_dims=(0, 0, dims, 0, 0), randomness="error")
        try:
            output: StepOutput = mapped(parameters, buffers, pulls, inputs, targets)
            check_gradient(module, output.losses)
            return output
        finally:
            module.pulls = NO_PULLS

    def scores(self, parameters: Named, buffers: Named, inputs: Tensor, shared: bool = False) -> Tensor:
        """Returns the outputs ``[C, B, ...]``, such as class scores, in float32, of every model in evaluation mode.

        Args:
            parameters: ``[C, ...]`` each.
            buffers: ``[C, ...]`` each.
            inputs: ``[C, B, ...]``, or ``[B, ...]`` if they are `shared`.
            shared: whether all models get the same inputs.
        """
        module = self.module.eval()

        def one(parameters: Named, buffers: Named, inputs: Tensor) -> Tensor:
            tensors = self._placed("network", parameters, buffers)
            scores: Tensor = functional_call(module, tensors, (inputs,), tie_weights=False)
            return scores.float()

        mapped = torch.vmap(one, in_dims=(0, 0, None if shared else 0), randomness="error")
        scores: Tensor = mapped(parameters, buffers, inputs)
        return scores

    def _placed(self, path: str, *stacks: Named) -> Named:
        """Returns tensors under the name of each place in the network at `path` that holds them."""
        return {
            f"{path}.{place}": each for stack in stacks for name, each in stack.items() for place in self._names[name]
        }

    def trial(self, spec: SampleSpec, device: torch.device) -> Probe:
        """Tries a step and an evaluation of two models near the network's own on random inputs. May change the module.

        Args:
            spec: what one sample looks like.
            device: the device that the module is on.

        Raises:
            Unsupported: if they fail or draw random numbers, or if a sample's scores depend on the other samples, with
                the reason.
        """
        inputs, targets = (each.unflatten(0, (2, SAMPLES)).to(device) for each in spec.blank(2 * SAMPLES))
        if spec.dtype.is_floating_point:
            with rng.seeded(0, "stacked trial"):
                inputs = torch.randn(2, SAMPLES, *spec.shape).to(device, spec.dtype)
        network, num_parameters = self.module.network, self.module.layout.num_parameters
        models = self._two_nearby().to(device)
        apart = self.module.buffer_layout
        kept = models[:, num_parameters:] if apart is None else torch.stack([apart.pack(network)] * 2)
        parameters = self.parameters(models)
        known = {each.data_ptr() for each in (*parameters.values(), *network.parameters())}
        saved = []

        def save(tensor: Tensor) -> Tensor:
            saved.append(0 if tensor.data_ptr() in known else tensor.nbytes)
            return tensor

        before, drawn = _unstacked_state(network, self.module.loss), _host_generators()
        try:
            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                self.step(parameters, self.buffers(kept.to(device)), inputs, targets)
            scores = self.scores(parameters, self.buffers(kept.to(device)), inputs)
            factor = 10 if spec.dtype.is_floating_point else 0  # the only other token that surely exists
            far = torch.cat([inputs[:, :1], factor * inputs[:, 1:]], dim=1)
            first = self.scores(parameters, self.buffers(kept.to(device)), far)[:, :1]
            after = _unstacked_state(network, self.module.loss)
        except Exception as error:
            if "random operation" in str(error):
                raise Unsupported(
                    "its step draws random numbers, as dropout does, and every client has its own random stream"
                ) from None
            reason = str(error).strip().partition("\n")[0]
            raise Unsupported(f"torch.vmap cannot map it over clients ({type(error).__name__}: {reason})") from None
        if _host_generators() != drawn:
            raise Unsupported("its step draws from random or numpy.random, and every client has its own random stream")
        if changed := [name for name in after if not _is_same(before.get(name), after[name])]:
            raise Unsupported(
                f"its step changes {changed[0]}, of which all clients would share one; a buffer that is persistent has "
                "a value for each client"
            )
        if not torch.allclose(scores[:, :1], first, rtol=APART, atol=APART, equal_nan=True):
            raise Unsupported("in evaluation the scores of one sample depend on the other samples")
        sample_bytes = inputs[0, 0].nbytes + sum(saved) // (2 * SAMPLES)
        ignores_padding = spec.dtype.is_floating_point and self._ignores_padding(
            parameters, kept.to(device), inputs, targets
        )
        return Probe(ignores_padding, sample_bytes)

    def _two_nearby(self) -> Tensor:
        """Returns two models near the network's own ``[2, P + Q]``: weights of zero would hide what depends on what."""
        layout = self.module.layout
        models = torch.stack([layout.pack(self.module.network)] * 2)
        with rng.seeded(1, "stacked trial"):
            for name, shape in layout.parameters:
                shift = 2 * torch.rand(2, shape.numel()) - 1
                models[:, layout.places[name]] += NEAR / shape[1:].numel() ** 0.5 * shift  # little for a layer's output
        return models

    def _ignores_padding(self, parameters: Named, kept: Tensor, inputs: Tensor, targets: Tensor) -> bool:
        """Returns whether a step stays the same if its batch gets an ignored sample that is far from the others.

        The loss and the updated buffers are compared. A step that logs values does not pass, because these may depend
        on the number of samples.
        """
        loss = self.module.loss
        plain = type(self.module).training_step is FederatedModule.training_step
        if not plain or type(loss) is not nn.CrossEntropyLoss or loss.reduction != "mean":
            return False
        more = torch.cat([inputs, 10 * inputs[:, :1].flip(-1)], dim=1)
        ignored = torch.cat([targets, torch.full_like(targets[:, :1], loss.ignore_index)], dim=1)
        with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
            few = self.step(parameters, self.buffers(kept), inputs, targets)
            many = self.step(parameters, self.buffers(kept), more, ignored)
        pairs = [(few.losses, many.losses), *((each, many.buffers[name]) for name, each in few.buffers.items())]
        return not few.logged and all(
            torch.allclose(one.double(), other.double(), rtol=APART, atol=APART) for one, other in pairs
        )


class _Step(nn.Module):
    """A module whose forward pass is the training step of another module."""

    def __init__(self, module: FederatedModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """Returns the loss."""
        return loss_of_step(self.module, batch, number)


def _names_of(network: nn.Module) -> dict[str, list[str]]:
    """Returns the places that hold each parameter and buffer, by its name: several, if layers share it.

    A layer that is registered twice is one place.
    """
    places: dict[int, list[str]] = {}
    for path, layer in network.named_modules():
        held = {**layer._parameters, **layer._buffers}
        for name, each in held.items():
            places.setdefault(id(each), []).append(f"{path}.{name}".lstrip("."))
    return {name: places[id(each)] for name, each in (*network.named_parameters(), *network.named_buffers())}


def _host_generators() -> bytes:
    """Returns the states of Python's and numpy's global generators, to compare."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


def _unstacked_state(network: nn.Module, loss: nn.Module) -> dict[str, Any]:
    """Returns copies of what the network and the loss may change and a flat vector does not hold, by name.

    These are buffers of the network that are not persistent, and attributes that are numbers, texts or the like.
    """
    held = network.state_dict()
    state: dict[str, Any] = {name: buffer.clone() for name, buffer in network.named_buffers() if name not in held}
    state |= {f"loss.{name}": buffer.clone() for name, buffer in loss.named_buffers()}
    for path, module in (*network.named_modules(), *loss.named_modules(prefix="loss")):
        own = {name: value for name, value in vars(module).items() if isinstance(value, SCALARS)}
        state |= {f"{path}.{name}".lstrip("."): value for name, value in own.items() if name != "training"}
    return state


def _is_same(value: object, other: object) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return value == other
