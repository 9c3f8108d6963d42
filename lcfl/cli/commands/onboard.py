"""``lcfl onboard --ckpt_path RUN``: adds the newcomers that a run kept out to its federation."""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path

from lcfl.cli.federated_cli import instantiate, instantiate_data
from lcfl.cli.fleet_config import newcomers_of
from lcfl.core.files import atomic_directory, check_new, read_json
from lcfl.federation.onboarding import STAGES, OnboardingResult, onboard
from lcfl.federation.session import run_of
from lcfl.runs import checkpoint_lookup

__all__ = ["main", "parser"]

TABLES = ("newcomers.json", "newcomers.csv")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    options = argparse.ArgumentParser(
        prog="lcfl onboard",
        allow_abbrev=False,
        description="Assigns newcomers to the clusters of a finished run: the clients that data.newcomers kept out, or "
        "new ones. Each trains the model that it receives, and its accuracy before and after is reported. The run "
        "itself does not change.",
    )
    options.add_argument("--ckpt_path", required=True, help="a run directory, a checkpoint, last, or best")
    options.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="a YAML file with the data section of new clients, who all join instead of those that the run kept out",
    )
    options.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="a new folder for the tables and the personalised model of every newcomer (client-<number>.pt); without "
        "it, the tables are written into the run directory and no model is kept",
    )
    options.add_argument("--epochs", type=int, default=5, help="training epochs of every newcomer (default: 5)")
    options.add_argument(
        "--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="device of the training (default: auto)"
    )
    options.add_argument(
        "--trainer.default_root_dir",
        dest="root",
        type=Path,
        default=Path("logs"),
        help="folder in which to look for last and best",
    )
    options.add_argument("--trainer.name", dest="name", default="lcfl", help="name of the run, for last and best")
    return options


def main(args: Sequence[str]) -> None:
    """Prints the table and writes ``newcomers.json`` and ``newcomers.csv``, and with ``--out`` the newcomers' models.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged, has other data, or is outside a run directory.
        FileExistsError: if the folder exists already.
        FileNotFoundError: if the data set is missing.
        ValueError: if the run kept no newcomers out, or if the data of new clients do not fit.
    """
    options = parser().parse_args(args)
    keeps = options.out is not None
    if keeps:
        check_new(options.out)
    path = checkpoint_lookup.find(options.ckpt_path, options.root, options.name)
    run = run_of(path)
    module, method = instantiate(run / "config.yaml")
    is_new, config = options.data is not None, run / "config.yaml"
    data = newcomers_of(config, options.data) if is_new else instantiate_data(config)
    result = onboard(path, module, data, method, options.epochs, options.accelerator, not is_new, keeps)
    with atomic_directory(options.out) if keeps else nullcontext(run) as folder:
        _keep_others(folder, result)
        result.write(folder)
    print(table(result))
    print(f"written to {(options.out or run) / 'newcomers.json'}, newcomers.csv{' and client-*.pt' * keeps}")


def _keep_others(folder: Path, result: OnboardingResult) -> None:
    """Renames earlier tables in a folder, unless they are the same, so that those of `result` do not replace them."""
    if not (folder / TABLES[0]).is_file() or read_json(folder / TABLES[0]) == result.content():
        return
    number = next(number for number in count(1) if not (folder / f"newcomers-{number}.json").exists())
    for path in [folder / name for name in TABLES]:
        if path.exists():
            path.replace(path.with_stem(f"{path.stem}-{number}"))
    print(f"the earlier tables are now newcomers-{number}.json and newcomers-{number}.csv")


def table(found: OnboardingResult) -> str:
    """Returns the table of the cluster of each newcomer, and of the reported metric before and after, by protocol."""
    is_one = len(found.joined) == 1
    title = f"{len(found.joined)} newcomer{'' if is_one else 's'} join{'s' * is_one} {found.checkpoint}"
    lines = [title, f"rule: {found.rule}"]
    clusters = sorted({each.cluster for each in found.joined if each.cluster is not None})
    called = {each.client: each.name or str(each.client) for each in found.joined}
    for cluster in clusters:
        clients = [called[each.client] for each in found.joined if each.cluster == cluster]
        lines.append(f"cluster {cluster}: {', '.join(clients)}")
    if not clusters:
        lines.append(f"clients: {', '.join(called.values())}")
    summary, reported = found.evaluation.summary(), found.evaluation.reported
    names = dict.fromkeys(name.rsplit("/", 2)[0] for name in summary)
    width = max(map(len, names), default=0)
    title = f"{reported.title}{reported.unit}"
    width = max(width, len(title))
    lines.append(f"{title:<{width}}  {'':<16}  {'mean':>6}  {'std':>6}  {'worst 10 %':>10}")
    labels = dict(zip(STAGES, ("as given", f"after {found.epochs} epochs"), strict=True))
    for name in names:
        for stage, label in labels.items():
            full = f"{name}/{stage}/{reported.name}"
            if full in summary:
                mean, std, worst = (reported.text(summary[full + part]) for part in ("", "_std", "_worst10"))
                lines.append(f"{name:<{width}}  {label:<16}  {mean:>6}  {std:>6}  {worst:>10}")
    down, up = (sum(getattr(each, name) for each in found.joined) for name in ("down_bytes", "up_bytes"))
    lines.append(f"{down / 1e6:,.2f} MB sent to the newcomers, {up / 1e6:,.2f} MB sent by them")
    return "\n".join(lines)
