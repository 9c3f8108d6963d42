"""Networks of the package transformers, built from their configuration, as networks of lcfl."""

from importlib import import_module
from typing import Any

from torch import Tensor, nn

__all__ = ["HuggingFaceNetwork", "huggingface"]


class HuggingFaceNetwork(nn.Module):
    """A network of transformers that returns class scores.

    Args:
        model: a network with a head for classification, such as ``BertForSequenceClassification``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns class scores ``[B, classes]``.

        Args:
            inputs: the numbers of tokens ``[B, T]``, in which the configuration's ``pad_token_id`` marks places to
                ignore; or images ``[B, C, H, W]`` for a network that takes these.
        """
        given = {}
        pad = getattr(self.model.config, "pad_token_id", None)
        if not inputs.is_floating_point() and pad is not None:
            is_token = inputs != pad
            is_empty = ~is_token.any(dim=1, keepdim=True)  # attention to nothing would be NaN
            given["attention_mask"] = (is_token | is_empty).long()
        scores: Tensor = self.model(inputs, **given).logits
        return scores


def huggingface(model: str, num_labels: int, config: dict[str, Any] | None = None) -> HuggingFaceNetwork:
    """Makes a network of transformers with drawn weights. Nothing is downloaded; `model.init_from` reads weights.

    The head is ``model.classifier`` or ``model.score``, as the class of transformers names it.

    Args:
        model: the name of a class of transformers with a head for classification (``BertForSequenceClassification``,
            ``ViTForImageClassification``), or its import path.
        num_labels: the number of classes.
        config: arguments of the configuration that belongs to the class (``hidden_size``, ``vocab_size``); the others
            have the defaults of transformers.

    Raises:
        ValueError: if transformers is not installed, or if it has no such class or the configuration no such argument.
    """
    path, _, name = model.rpartition(".")
    try:
        kind = getattr(import_module(path or "transformers"), name, None)
    except ImportError as error:
        raise ValueError(
            f"model.network: {model} cannot be imported ({error}). lcfl.models.huggingface needs the package "
            "transformers: pip install 'lcfl[transformers]'."
        ) from None
    make_config = getattr(kind, "config_class", None)
    if kind is None or make_config is None:
        raise ValueError(
            f"model.network: got {model!r}, which is no network of transformers with a configuration; give a class "
            "such as BertForSequenceClassification."
        )
    known, given = make_config(), config or {}
    if unknown := [key for key in given if not hasattr(known, key)]:
        raise ValueError(
            f"model.network: {make_config.__name__} has no {', '.join(unknown)}; it has "
            f"{', '.join(key for key in known.to_dict() if not key.startswith('_'))}."
        )
    return HuggingFaceNetwork(kind(make_config(**given, num_labels=num_labels)))
