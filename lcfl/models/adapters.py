"""Adapters of low rank (LoRA) in any network, by the package peft."""

from collections.abc import Sequence

from torch import nn

from lcfl.models.patterns import layers_of, matching
from lcfl.models.split_network import NetworkFactory

__all__ = ["lora"]


def lora(
    network: NetworkFactory,
    target_modules: list[str],
    rank: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    also_train: Sequence[str] = (),
) -> nn.Module:
    """Makes a network whose named layers have an adapter of low rank each; everything else is frozen.

    A layer with the weight W computes with W + alpha/rank B A, of which only A and B are trained (Hu et al., LoRA:
    Low-Rank Adaptation of Large Language Models, section 4.1). A is drawn and B is zero, so that the network begins
    as the one without adapters. The parameters are named ``<layer>.lora_A.default.weight`` and ``...lora_B...``. The
    weight W is ``<layer>.base_layer.weight``, and `model.init_from` finds it under its name without ``base_layer``.

    Args:
        network: makes the network.
        target_modules: names of linear layers, convolutions or embeddings, or the ends of their names (``query``).
        rank: the rank r of an adapter.
        alpha: the factor of all adapters, times the rank.
        dropout: the probability with which an input of an adapter is set to zero in training.
        also_train: patterns (`lcfl.models.patterns`) of other parameters that are trained, above all the head.

    Raises:
        ValueError: if peft is not installed, or if the network has no such layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ValueError("model.network: lcfl.models.lora needs the package peft: pip install 'lcfl[lora]'.") from None
    made = network()
    names = [name for name, _ in made.named_parameters()]
    also = matching(also_train, names, "model.network.also_train", f"the network {type(made).__name__}")
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(target_modules))
    try:
        inject_adapter_in_model(config, made)
    except ValueError as error:
        raise ValueError(
            f"model.network.target_modules: got {target_modules}, which peft refuses ({error}). The layers of the "
            f"network {type(made).__name__} are {', '.join(layers_of(names))}."
        ) from error
    for name, parameter in made.named_parameters():
        if name in also:
            parameter.requires_grad_()
    return made
