"""The trivial baseline of a task: clients whose model always predicts the same, whatever the input.

It predicts the constant that fits the client's training targets best: the most frequent class, the mean of numbers, the
share of each of several labels, the most frequent token. A model that does not beat it is no better than a guess.
Legend: n samples, C classes.
"""

import copy
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lcfl.core import rng
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.protocols import BACKDOOR
from lcfl.distributed.worker import blank_output, measure, most_outputs
from lcfl.models.metrics import ignore_index
from lcfl.models.module import FederatedModule

__all__ = ["constant_output", "trivial_baselines"]


def trivial_baselines(
    module: FederatedModule, data: FederatedDataModule, clients: Sequence[int], seed: int = 0
) -> list[dict[str, float]]:
    """Returns for each client the reported metric by protocol; nan without test samples or without a constant.

    Args:
        module: the network, loss and metrics.
        data: the data module after its setup.
        clients: the clients to measure.
        seed: the run's seed, for data sets whose items are random.
    """
    population, labels = data.population, data.samples.labels
    protocols = [name for name in data.protocols if name != BACKDOOR]
    ignored = ignore_index(module.loss)
    all_count = ignored is None or not 0 <= ignored < (data.dataset.spec.num_classes or 0)
    if module.reported.is_accuracy and labels is not None and all_count:  # the same without a forward pass for each
        values = {protocol: population.majority_accuracy(protocol, labels, clients) for protocol in protocols}
    else:
        shape = blank_output(module, data.dataset.spec).shape[1:]
        module = copy.deepcopy(module).cpu().eval()
        values = {protocol: _measured(module, data, clients, protocol, shape, seed) for protocol in protocols}
    return [{protocol: float(each[place]) for protocol, each in values.items()} for place in range(len(clients))]


@torch.no_grad()
def _measured(
    module: FederatedModule,
    data: FederatedDataModule,
    clients: Sequence[int],
    protocol: str,
    shape: torch.Size,
    seed: int,
) -> NDArray[np.float64]:
    """Returns the reported metric of each client ``[n]``."""
    values = np.full(len(clients), np.nan)
    for place, client in enumerate(clients):
        own, test = data.seen_by(client), data.population.test[protocol][client]
        if not len(test):  # items cannot be stacked if there are none
            continue
        with rng.seeded(seed, "trivial", client):
            learnt = own.targets(data.population.train[client])
            targets = data.seen_by(client, protocol).targets(test)
        constant = constant_output(learnt, shape, module.loss)
        if constant is not None:
            pieces = targets.split(most_outputs(shape.numel()))
            batches = ((constant.expand(len(piece), *shape).contiguous(), piece) for piece in pieces)
            try:
                values[place] = measure(module, batches).get(module.reported.name, np.nan)
            except Exception as error:  # of the user's metric, which must not cost a run its result
                warnings.warn(
                    f"{module.reported.name} cannot measure a constant output ({type(error).__name__}: {error}), so "
                    "there is no trivial baseline.",
                    stacklevel=2,
                )
                return np.full(len(clients), np.nan)
    return values


def constant_output(targets: Tensor, shape: torch.Size, loss: nn.Module) -> Tensor | None:
    """Returns the constant output of a network that fits training targets best.

    For classes ``[n, ...]`` these are scores: the logarithm of the share of each class, which counts one sample more
    for each class, so that it is finite. For numbers it is their mean, for the logits of `nn.BCEWithLogitsLoss` the
    logit of their mean, with two samples more, one of each kind. For `nn.PoissonNLLLoss`, whose outputs are logarithms
    of rates unless it says otherwise, it is the logarithm of the mean.

    Args:
        targets: training targets ``[n, ...]``.
        shape: the shape of the network's output for one sample: ``[C, ...]`` for classes, that of a target for numbers.
        loss: the loss, which says how the outputs are read.

    Returns:
        ``[*shape]``; None if outputs and targets have other shapes.
    """
    if not targets.is_floating_point() and len(shape) and shape[1:] == targets.shape[1:]:
        seen = targets[targets != ignored] if (ignored := ignore_index(loss)) is not None else targets
        if len(seen) and (seen.min() < 0 or seen.max() >= shape[0]):
            return None
        count_C = seen.flatten().bincount(minlength=shape[0])
        scores = (count_C + 1.0).log() - (count_C.sum() + float(shape[0])).log()
        return scores.view(-1, *[1] * len(shape[1:])).expand(shape)
    if shape != targets.shape[1:]:
        return None
    targets = targets.float()
    if isinstance(loss, nn.BCEWithLogitsLoss):
        return ((targets.sum(0) + 1) / (len(targets) + 2)).logit()
    if isinstance(loss, nn.PoissonNLLLoss) and loss.log_input:
        return targets.mean(0).clamp(min=loss.eps).log()
    return targets.mean(0)
