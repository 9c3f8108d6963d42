"""Robust rules. docs/results.md explains the differences."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from authors.common import Network, Row, code_in
from lcfl import methods as parts
from lcfl.models.module import FederatedModule

NAMES = [f"codes.aggregator.{name}" for name in ("coordinatewise_median", "trimmed_mean", "krum", "rfa", "clipping")]


def rules(folder: Path) -> Iterator[Row]:
    """Compares what ten or eleven clients are merged to, and whom Krum chooses among ten random models."""
    layout, draw = FederatedModule(Network, cut="linear").layout, torch.Generator().manual_seed(0)
    with code_in(folder, *NAMES) as (median, trimmed, krum, rfa, clipping):
        for n in (10, 11):
            start = torch.randn(layout.size, generator=draw)
            updates = 0.3 * torch.randn(n, layout.size, generator=draw)
            updates[:2] += 3.0  # two attackers
            pairs: list[tuple[str, Any, Any]] = [
                ("median", parts.CoordinateMedian(), median.CM()),
                ("trimmed mean, two at either end", parts.TrimmedMean(2 / n), trimmed.TM(2)),
                ("Krum", parts.Krum(2 / n), krum.Krum(n, 2, 1)),
                ("geometric median, 100 steps", parts.GeometricMedian(100), rfa.RFA(100, 1e-6)),
                ("geometric median, 2 steps", parts.GeometricMedian(2), rfa.RFA(2, 1e-6)),
                ("clipping, 1 step", parts.ClippedMean(2.0), clipping.Clipping(2.0)),
                ("clipping, 3 steps", parts.ClippedMean(2.0, 3), clipping.Clipping(2.0, 3)),
            ]
            early = "they begin at w, lcfl at the median, and the algorithm has not converged"
            for name, ours, theirs in pairs:
                merged = ours(list(start + updates), [1.0] * n, start, layout)
                reason = early if name == "geometric median, 2 steps" else ""
                yield Row(f"{name}, n = {n}", merged, start + theirs(list(updates)), start, reason)

        def differ(models: list[Tensor]) -> bool:
            ours = parts.Krum(0.2)(models, [1.0] * 10, torch.zeros(layout.size), layout)
            return not torch.equal(ours, krum.Krum(10, 2, 1)(models))

        apart = sum(differ(list(torch.randn(10, layout.size, generator=draw))) for _ in range(200))
    reason = "they square the squared distances once more"
    yield Row("200 choices of Krum among equals, that differ", torch.tensor([apart]), torch.zeros(1), reason=reason)
