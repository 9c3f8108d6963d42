"""What of a network is frozen: equal in all models, and changed by no training."""

from collections.abc import Sequence

from torch import Tensor, nn

from lcfl.models.patterns import layers_of, matching

__all__ = ["frozen_layers", "persistent_buffers", "set_trainable"]


def set_trainable(network: nn.Module, patterns: Sequence[str] | None) -> None:
    """Trains the parameters that a pattern covers and freezes the others; None leaves what the network says.

    A parameter is frozen if its ``requires_grad`` is False.

    Raises:
        ValueError: for a pattern that covers no parameter, or if no parameter is left to train.
    """
    owner, parameters = f"the network {type(network).__name__}", dict(network.named_parameters())
    if patterns is not None:
        trained = matching(patterns, parameters, "model.trainable", owner)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)
    if parameters and not any(each.requires_grad for each in parameters.values()):
        raise ValueError(
            f"model.trainable: got {patterns}, so no parameter of {owner} is trained; name at least one of its layers, "
            f"which are {', '.join(layers_of(parameters))}."
        )


def persistent_buffers(network: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that a model includes, by name."""
    persistent = network.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in network.named_buffers() if name in persistent}


def frozen_layers(network: nn.Module) -> list[str]:
    """Returns the layers whose persistent buffers are frozen.

    These are the layers that have such buffers and only frozen parameters. A layer without parameters, such as a
    BatchNorm with ``affine=False``, goes with the smallest module around it that has parameters: it is frozen if all
    of these are. In a network without frozen parameters there are no such layers.
    """
    if all(parameter.requires_grad for parameter in network.parameters()):
        return []
    layers = dict.fromkeys(name.rpartition(".")[0] for name in persistent_buffers(network))
    return [layer for layer in layers if not any(each.requires_grad for each in _nearest_parameters(network, layer))]


def _nearest_parameters(network: nn.Module, layer: str) -> list[nn.Parameter]:
    """Returns the parameters of a layer itself, or of the smallest module that has the layer in it and has some."""
    parts = layer.split(".") if layer else []
    around = [network.get_submodule(".".join(parts[:end])) for end in range(len(parts), -1, -1)]
    own = list(around[0].parameters(recurse=False))
    return own or next(found for each in around if (found := list(each.parameters())))
