"""LightningCLI over a `Federation`: the groups trainer, method, model and data."""

import difflib
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import rich
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import lcfl.aggregation
import lcfl.callbacks
import lcfl.clustering
import lcfl.data.datasets
import lcfl.data.partition
import lcfl.exchange
import lcfl.local
import lcfl.networks
from lcfl.data.datamodule import FederatedDataModule
from lcfl.federation import Federation
from lcfl.layers import LayeredConfig
from lcfl.method import Method
from lcfl.module import FederatedModule

__all__ = ["FederatedCLI", "main"]

PARTS = (
    lcfl.aggregation,
    lcfl.callbacks,
    lcfl.clustering,
    lcfl.data.datasets,
    lcfl.data.partition,
    lcfl.exchange,
    lcfl.local,
    lcfl.networks,
)


class Parser(LightningArgumentParser):
    """Reads layers as `LayeredConfig` does, and answers a misspelt class with the names there are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for action in self._actions:
            if type(action).__name__ == "ActionConfigFile":
                action.__class__ = LayeredConfig

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends with status 2 and the message; one that is about an unknown class names the closest known ones."""
        unknown = re.search(r"Expected a dot import path string: (\w+)", message)
        if unknown:
            known = [name for part in PARTS for name in part.__all__]
            close = difflib.get_close_matches(unknown[1], known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "or the import path of a class of your own."
            message = f"there is no class {unknown[1]!r}: {hint} Classes of lcfl: {', '.join(known)}.\n{message}"
        super().error(message, ex)


class FederatedCLI(LightningCLI):
    """``lcfl fit | validate | test``: LightningCLI whose trainer is a `Federation` and which knows methods."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The four groups; `seed_everything` is also the federation's seed."""
        parser.add_class_arguments(
            self.trainer_class, "trainer", instantiate=False, fail_untyped=False, sub_configs=True
        )
        parser.set_defaults({f"trainer.{k}": v for k, v in self.trainer_defaults.items() if k != "callbacks"})
        parser.add_class_arguments(Method, "method", fail_untyped=False, sub_configs=True)
        parser.add_lightning_class_args(FederatedModule, "model", subclass_mode=False)
        parser.add_lightning_class_args(FederatedDataModule, "data", subclass_mode=False)
        parser.link_arguments("seed_everything", "trainer.seed", compute_fn=_seed)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The commands and the arguments that are groups instead of options."""
        groups = {"model", "datamodule", "method"}
        return {"fit": groups, "validate": groups, "test": groups}

    def before_instantiate_classes(self) -> None:
        """A function in the place of a network (``torchvision.models.resnet18``) is kept to be called later."""
        self.parser.add_instantiator(_later, Callable, subclasses=False)  # type: ignore[arg-type]

    def fit(self, **arguments: Any) -> None:
        """Trains; a run that a signal stopped ends with status 128 + its number."""
        self.result = self.trainer.fit(**arguments)
        if self.result.signal:
            sys.exit(128 + self.result.signal)

    def validate(self, **arguments: Any) -> None:
        """Evaluates on validation data and prints the table."""
        self.result = self.trainer.validate(**arguments)
        print_evaluation(self.result, "val")

    def test(self, **arguments: Any) -> None:
        """Evaluates on test data and prints the table."""
        self.result = self.trainer.test(**arguments)
        print_evaluation(self.result, "test")

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = super()._prepare_subcommand_kwargs(subcommand)
        return kwargs | {"method": self._get(self.config_init, "method")}

    def _parse_ckpt_path(self) -> None:
        """LightningCLI would open the checkpoint and let its contents override the command line."""


def _seed(seed: bool | int | None) -> int:
    return int(seed) if seed is not True and seed is not None else 0


def _later(function: Any, *args: Any, **kwargs: Any) -> Any:
    return functools.partial(function, *args, **kwargs)


def instantiate(config: Path) -> tuple[FederatedModule, Method]:
    """The module and the method of a run's ``config.yaml``.

    Raises:
        ValueError: if the run was not started from the command line.
    """
    if "described" in yaml.safe_load(config.read_text()):
        raise ValueError(
            f"{config} describes a run that was started from Python; give its objects: "
            "lcfl.load(run, model=..., method=...)."
        )
    cli = _cli(args=["-c", str(config)], run=False)
    return cli.model, cli.config_init["method"]


def print_evaluation(metrics: dict[str, float], stage: str) -> None:
    """Prints the table of an evaluation."""
    from lcfl.callbacks.progress import evaluation_table

    rich.print(evaluation_table(metrics, stage))


def main(args: list[str] | None = None) -> Any:
    """Runs ``lcfl <args>``; returns what the command returned.

    Args:
        args: as on the command line; those of this process if None.
    """
    return getattr(_cli(args=args), "result", None)


def _cli(**arguments: Any) -> FederatedCLI:
    return FederatedCLI(
        FederatedModule,
        FederatedDataModule,
        trainer_class=Federation,  # type: ignore[arg-type]
        parser_class=Parser,
        parser_kwargs={"prog": "lcfl"},
        auto_configure_optimizers=False,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        **arguments,
    )
