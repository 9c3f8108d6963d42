"""What the kernels need to know of a module's loss and optimizer."""

from math import inf, nan

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from lcfl.data.spec import SampleSpec
from lcfl.engines import kernels
from lcfl.engines.forward_graph import Unsupported
from lcfl.methods.local.sgd import plain_settings, sgd_settings
from lcfl.models.hooks import has_hooks
from lcfl.models.metrics import CLASS_LOSSES
from lcfl.models.module import FederatedModule

__all__ = ["check_loss", "check_targets", "loss_settings", "optimizer_settings"]

KIND_OF = {  # see cpp/program.h
    nn.CrossEntropyLoss: 0,
    nn.NLLLoss: 0,
    nn.MSELoss: 1,
    nn.BCEWithLogitsLoss: 2,
    nn.L1Loss: 3,
    nn.HuberLoss: 4,
    nn.SmoothL1Loss: 5,
}

LEAST = 1e-30  # threshold; the kernels divide by it in float32


def check_loss(loss: nn.Module, spec: SampleSpec) -> None:
    """Checks that the kernels differentiate a loss as its class says.

    Raises:
        Unsupported: if they do not, with the reason.
    """
    if type(loss) not in KIND_OF:
        names = [each.__name__ for each in KIND_OF]
        raise Unsupported(f"the loss is {loss}, not {', '.join(names[:-1])} or {names[-1]}")
    if has_hooks(loss) or "forward" in vars(loss):
        raise Unsupported("the loss has hooks or another forward")
    if loss.reduction != "mean":
        raise Unsupported(f"the loss is a {loss.reduction}, not a mean")
    if isinstance(loss, CLASS_LOSSES):
        if spec.num_classes is None:
            raise Unsupported("the targets are not classes")
        if loss.ignore_index >= 0:
            raise Unsupported(f"the loss ignores label {loss.ignore_index}")
        if not 0 <= _smoothing(loss) <= 1:
            raise Unsupported(f"the label smoothing is {loss.label_smoothing}, not from 0 to 1")
    elif spec.num_classes is not None or spec.target_dtype != torch.float32:
        raise Unsupported("the targets are not numbers in float32")
    elif not (LEAST <= _threshold(loss) < inf or (_threshold(loss) == 0 and not isinstance(loss, nn.HuberLoss))):
        raise Unsupported(f"the threshold of {loss} is not a number of at least {LEAST}")
    elif isinstance(loss, nn.BCEWithLogitsLoss) and loss.weight is not None:
        raise Unsupported("the loss has other weights than those of positive targets")


def check_targets(loss: nn.Module, spec: SampleSpec, outputs: int, log_softmax: bool) -> None:
    """Checks that loss, targets and weights fit a network with so many outputs.

    Args:
        loss: one that `check_loss` accepts.
        spec: what one sample looks like.
        outputs: C.
        log_softmax: whether they are a log softmax.

    Raises:
        Unsupported: if they do not, with the reason.
    """
    if log_softmax and not isinstance(loss, CLASS_LOSSES):
        raise Unsupported(f"its network ends with a log softmax, and the loss is {loss}")
    if isinstance(loss, nn.NLLLoss) and not log_softmax:
        raise Unsupported(f"the loss is {loss}, and its network does not end with a log softmax")
    if spec.num_classes is None and spec.target_shape != (outputs,):
        raise Unsupported(f"a target has the shape {spec.target_shape}, and an output ({outputs},)")
    weights = _weights(loss)
    if weights is None:
        return
    if weights.shape != (outputs,) or weights.dtype != torch.float32:
        raise Unsupported(
            f"the loss has weights of shape {tuple(weights.shape)} in {weights.dtype} for {outputs} outputs"
        )
    if not weights.is_contiguous() or weights.requires_grad:
        raise Unsupported("the weights of the loss are a view, or require a gradient")


def loss_settings(loss: nn.Module) -> kernels.Loss:
    """Returns a loss as the kernels expect it. It points to the weights of the loss."""
    weights = _weights(loss)
    address = None if weights is None else weights.data_ptr()
    kind = nn.L1Loss if isinstance(loss, nn.SmoothL1Loss) and loss.beta == 0 else type(loss)
    return kernels.Loss(KIND_OF[kind], _smoothing(loss), _threshold(loss), address)


def _smoothing(loss: nn.Module) -> float:
    return getattr(loss, "label_smoothing", 0.0)


def _threshold(loss: nn.Module) -> float:
    """Returns the error from which a loss is linear; 0 for other losses."""
    threshold = getattr(loss, "delta", getattr(loss, "beta", 0.0))
    return threshold if isinstance(threshold, float | int) else nan


def _weights(loss: nn.Module) -> Tensor | None:
    """Returns the weights of classes or of positive targets."""
    weights: Tensor | None = getattr(loss, "pos_weight" if isinstance(loss, nn.BCEWithLogitsLoss) else "weight", None)
    return weights


def optimizer_settings(module: FederatedModule) -> kernels.Optimizer:
    """Returns the module's optimizer and its pulls as the kernels expect them.

    Raises:
        Unsupported: if the kernels cannot take its steps, with the reason.
    """
    if (sgd := sgd_settings(module)) is not None:
        made = kernels.Optimizer(**vars(sgd))
    elif (adam := plain_settings(module, Adam, AdamW)) is not None and not (adam["amsgrad"] or adam["capturable"]):
        made = kernels.Optimizer(
            is_adam=True,
            rate=adam["lr"],
            weight_decay=adam["weight_decay"],
            decoupled=adam["decoupled_weight_decay"],
            beta1=adam["betas"][0],
            beta2=adam["betas"][1],
            eps=adam["eps"],
        )
    else:
        raise Unsupported(
            f"the optimizer is {type(module.configure_optimizers()).__name__}, not torch.optim.SGD, Adam or AdamW that "
            "minimizes, without hooks or amsgrad, with the same plain settings for all parameters"
        )
    made.cluster_weight, made.global_weight = module.cluster_weight, module.global_weight
    made.num_embedding = module.layout.num_embedding
    return made
