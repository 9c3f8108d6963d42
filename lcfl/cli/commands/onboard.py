"""``lcfl onboard --ckpt_path RUN``: the newcomers that a run kept out join its federation."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lcfl.cli.federated_cli import instantiate, instantiate_data
from lcfl.federation.onboarding import STAGES, OnboardingResult, onboard
from lcfl.federation.session import run_of
from lcfl.runs import checkpoint_lookup

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(
        prog="lcfl onboard",
        description="Places the clients that data.newcomers kept out into the clusters of a finished run, lets each "
        "train the model that it is given, and reports its accuracy before and after. The run itself is not changed.",
    )
    made.add_argument("--ckpt_path", required=True, help="a run directory, a checkpoint, last, or best")
    made.add_argument("--epochs", type=int, default=5, help="of every newcomer's own training (default: 5)")
    made.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"))
    made.add_argument("--trainer.default_root_dir", dest="root", type=Path, default=Path("logs"), help="for last, best")
    made.add_argument("--trainer.name", dest="name", default="lcfl", help="for last and best")
    return made


def main(args: Sequence[str]) -> None:
    """Prints the table and writes ``newcomers.json`` and ``newcomers.csv`` into the run directory.

    Raises:
        CheckpointError: if the checkpoint is missing, damaged, of other data, or outside a run directory.
        FileNotFoundError: if the data are not there.
        ValueError: if the run kept no newcomers out.
    """
    options = parser().parse_args(args)
    path = checkpoint_lookup.find(options.ckpt_path, options.root, options.name)
    run = run_of(path)
    module, method = instantiate(run / "config.yaml")
    data = instantiate_data(run / "config.yaml")
    found = onboard(path, module, data, method, options.epochs, options.accelerator)
    found.write(run)
    print(table(found))
    print(f"written to {run / 'newcomers.json'} and newcomers.csv")


def table(found: OnboardingResult) -> str:
    """Which cluster each newcomer joined, and the accuracies over newcomers in %, by protocol, before and after."""
    lines = [f"{len(found.joined)} newcomers join {found.checkpoint}", f"rule: {found.rule}"]
    clusters = sorted({each.cluster for each in found.joined if each.cluster is not None})
    for cluster in clusters:
        clients = [each.client for each in found.joined if each.cluster == cluster]
        lines.append(f"cluster {cluster}: {', '.join(map(str, clients))}")
    summary = found.evaluation.summary()
    names = dict.fromkeys(name.rsplit("/", 2)[0] for name in summary)
    width = max(map(len, names), default=0)
    lines.append(f"{'accuracy in %':<{width}}  {'':<16}  {'mean':>6}  {'std':>6}  {'worst 10 %':>10}")
    labels = dict(zip(STAGES, ("as given", f"after {found.epochs} epochs"), strict=True))
    for name in names:
        for stage, label in labels.items():
            acc = f"{name}/{stage}/acc"
            if acc in summary:
                mean, std, worst = (100 * summary[acc + part] for part in ("", "_std", "_worst10"))
                lines.append(f"{name:<{width}}  {label:<16}  {mean:>6.2f}  {std:>6.2f}  {worst:>10.2f}")
    down, up = (sum(getattr(each, name) for each in found.joined) for name in ("down_bytes", "up_bytes"))
    lines.append(f"{down / 1e6:,.1f} MB sent to them, {up / 1e6:,.1f} MB by them")
    return "\n".join(lines)
