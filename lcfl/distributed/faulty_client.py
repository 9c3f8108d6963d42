"""What a faulty client sends in place of what it has trained.

Legend: P parameters and Q buffer entries in a model's flat vector.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lcfl.core.messages import Downlink, unchanged
from lcfl.data.faults import ClientFault
from lcfl.distributed.client_output import ClientOutputError
from lcfl.methods.local.training import LocalOutput

__all__ = ["as_sent"]


def as_sent(
    faults: Sequence[ClientFault],
    output: LocalOutput,
    downlink: Downlink,
    before: Tensor | None,
    num_parameters: int,
    draw: np.random.Generator,
) -> LocalOutput:
    """Returns the output of a local run with the parameters that a client with these faults sends.

    Everything else is sent as it is. An output without a model stays as it is, and so does one that answers no model.

    Args:
        faults: the faults, in the order in which they happen.
        output: the output of the honest run.
        downlink: what the client was sent, combined with what it keeps.
        before: the parameters ``[P]`` that it trained when it took part before; None the first time.
        num_parameters: P.
        draw: the source of random numbers.
    """
    trained, received = output.for_server, downlink.model_for(output.extras)
    if not len(trained) or received is None:
        return output
    parameters = honest = trained[:num_parameters]
    for fault in faults:
        given = {"trained": parameters, "received": received} | ({} if before is None else {"before": before})
        name = f"data.faults: {type(fault).__name__}.sent"
        with unchanged({"its arguments in place, which are still needed": [given]}, ClientOutputError, name):
            parameters = fault.sent(parameters, received[:num_parameters], before, draw)
        if not isinstance(parameters, Tensor) or parameters.shape != honest.shape or parameters.dtype != honest.dtype:
            got = getattr(parameters, "dtype", type(parameters).__name__), list(getattr(parameters, "shape", ()))
            raise ClientOutputError(
                f"{name} returned {got[0]} of shape {got[1]}; it must return a tensor of torch.float32 and shape "
                f"[{num_parameters}]."
            )
    if parameters is honest:
        return output
    model = torch.cat([parameters, trained[num_parameters:]])
    if "model" in output.extras:
        return replace(output, extras={**output.extras, "model": model})
    return replace(output, model=model)
