"""The samples of all clients in one loader, for ``lightning.Trainer``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, default_collate

from lcfl.data.partition.base import Indices
from lcfl.data.samples import Samples

__all__ = ["pooled_loader"]


def pooled_loader(
    seen: Sequence[Samples], lists: Sequence[Indices], batch_size: int, is_train: bool, drop_last: bool
) -> DataLoader[Any]:
    """Returns a loader of the clients' samples. A sample occurs once for each way in which clients see it.

    Args:
        seen: for each client, all samples as it sees them.
        lists: for each client, the indices of its samples.
        batch_size: number of samples of a batch.
        is_train: whether batches are shuffled and augmented.
        drop_last: whether to drop a shorter last batch, if there is another one.
    """
    by_view: dict[Samples, list[Indices]] = {}
    for samples, indices in zip(seen, lists, strict=True):
        by_view.setdefault(samples, []).append(indices)
    parts = [_Pooled(samples, np.unique(np.concatenate(own)), is_train) for samples, own in by_view.items()]
    pooled: Dataset[Any] = parts[0] if len(parts) == 1 else ConcatDataset(parts)
    collate = _unchanged if len(parts) == 1 else default_collate
    drop_last = drop_last and sum(map(len, parts)) >= batch_size
    return DataLoader(pooled, batch_size=batch_size, shuffle=is_train, collate_fn=collate, drop_last=drop_last)


class _Pooled(Dataset[Any]):
    """A data set of some samples that gathers whole batches, because torch's loader calls ``__getitems__``."""

    def __init__(self, samples: Samples, indices: Indices, is_train: bool) -> None:
        self.gather = samples.training_batch if is_train else samples.batch
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.gather(self.indices[indices], torch.device("cpu"))


def _unchanged(batch: Any) -> Any:
    return batch
