"""LightningCLI over a `Federation`: the groups trainer, method, model and data."""

import functools
import logging
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import rich
import yaml
from jsonargparse import ArgumentError, Namespace
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import lcfl
from lcfl.cli.layered_config import LayeredConfig, names_class
from lcfl.cli.parser import Parser, Seed, check_given
from lcfl.core.renamed import current_path, with_current_names
from lcfl.data.datamodule import FederatedDataModule, errors_of
from lcfl.data.datasets import FederatedDataset
from lcfl.data.partition import Partition
from lcfl.federation.federation import Federation
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule
from lcfl.runs.result import Run

__all__ = ["FederatedCLI", "instantiate", "instantiate_data", "main"]


class FederatedCLI(LightningCLI):
    """``lcfl fit | validate | test``: LightningCLI whose trainer is a `Federation` and which knows methods.

    Args:
        model_class: of the module; the command's words may name a subclass of it, ``--model.class_path``.
        datamodule_class: of the data module; likewise.
        args: as on the command line; those of this process if None.
        options: further ones of LightningCLI.
    """

    trainer: Federation  # type: ignore[assignment]
    _model_class: type[FederatedModule]
    _datamodule_class: type[FederatedDataModule]
    result: Run | dict[str, float]

    def __init__(
        self,
        model_class: type[FederatedModule] = FederatedModule,
        datamodule_class: type[FederatedDataModule] = FederatedDataModule,
        args: list[str] | None = None,
        **options: Any,
    ) -> None:
        words = sys.argv[1:] if args is None else args
        defaults: dict[str, Any] = {
            "trainer_class": Federation,
            "parser_class": Parser,
            "parser_kwargs": {"prog": "lcfl"},
            "auto_configure_optimizers": False,
            "load_from_checkpoint_support": False,  # its hooks would travel, with the whole CLI, to spawned ranks
            "save_config_kwargs": {"overwrite": True},
            # The class of one's own stands in config.yaml: what opens the run later must make the same one.
            "subclass_mode_model": model_class is not FederatedModule or names_class(words, "model"),
            "subclass_mode_data": datamodule_class is not FederatedDataModule or names_class(words, "data"),
        }
        super().__init__(model_class, datamodule_class, args=args, **defaults | options)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser whose ``-c`` files layer as `LayeredConfig` says."""
        parser: LightningArgumentParser = self.parser_class(dump_header=[f"lcfl {lcfl.__version__}"], **kwargs)
        parser.add_argument("-c", "--config", action=LayeredConfig, help="A YAML file; several layer, later ones win.")
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The seed: a plain number, unlike LightningCLI's, so that every run says which one it had."""
        parser.add_argument(
            "--seed_everything", type=Seed, default=0, help="Seed of everything random but the partition (data.seed)."
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The four groups; the federation's seed is `seed_everything` and no option of its own."""
        parser.add_class_arguments(
            self.trainer_class, "trainer", skip={"seed"}, instantiate=False, fail_untyped=False, sub_configs=True
        )
        parser.set_defaults({f"trainer.{k}": v for k, v in self.trainer_defaults.items() if k != "callbacks"})
        assert isinstance(parser, Parser)
        parser.add_group("method", Method)
        parser.add_group("model", self._model_class, self.subclass_mode_model)
        parser.add_group("data", self._datamodule_class, self.subclass_mode_data)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The commands and the arguments that are groups instead of options."""
        groups = {"model", "datamodule", "method"}
        return {"fit": groups, "validate": groups, "test": groups}

    def before_instantiate_classes(self) -> None:
        """Errors of data classes name their option; a function in the place of a network is kept to be called later."""
        for option, kind in {"data.dataset": FederatedDataset, "data.partition": Partition}.items():
            self.parser.add_instantiator(functools.partial(_made, option), kind)
        for group in ("trainer", "model", "data", "method"):
            check_given(self._get(self.config, group), group)
        _keep_functions(self.parser, self._get(self.config, "model"))

    def instantiate_trainer(self, **kwargs: Any) -> Federation:  # type: ignore[override]
        """The federation, with the seed."""
        trainer: Any = super().instantiate_trainer(seed=int(self._get(self.config, "seed_everything")), **kwargs)
        assert isinstance(trainer, Federation)
        return trainer

    def fit(self, **arguments: Any) -> None:
        """Trains; a run that a signal stopped ends with status 128 + its number."""
        self.result = self.trainer.fit(**arguments)
        if self.result.signal:
            sys.exit(128 + self.result.signal)
        if self.trainer.fast_dev_run:
            _say_once("fast_dev_run: one round of everything on random data went through; nothing was kept")

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


def main(args: list[str] | None = None) -> Run | dict[str, float]:
    """Runs ``lcfl <args>``; returns the run that ``fit`` made, or the metrics of ``validate`` and ``test``.

    Args:
        args: as on the command line; those of this process if None.
    """
    if not os.environ.get("LCFL_DEBUG"):  # a seed and a rendezvous that nobody asked about
        for name in ("lightning.fabric", "lightning.pytorch"):
            logging.getLogger(name).setLevel(logging.WARNING)
    ours = logging.getLogger("lcfl")
    if not ours.hasHandlers():
        ours.addHandler(logging.StreamHandler())
        ours.setLevel(logging.INFO)
    return FederatedCLI(args=args).result


def instantiate(config: Path) -> tuple[FederatedModule, Method]:
    """The module and the method of a run's ``config.yaml``; its data and its trainer are not built.

    Raises:
        ValueError: if the run was not started from the command line, or the file does not fit this version.
    """
    parser, parsed = _parsed(config, {"method": Method, "model": FederatedModule})
    if "init_from" in (arguments := _arguments(parsed["model"])):
        arguments["init_from"] = None  # the models are there; the file need not be any more
    _keep_functions(parser, parsed["model"])
    made = parser.instantiate(parsed)
    return made["model"], made["method"]


def instantiate_data(config: Path) -> FederatedDataModule:
    """The data module of a run's ``config.yaml``, not set up.

    Raises:
        ValueError: as `instantiate`.
    """
    parser, parsed = _parsed(config, {"data": FederatedDataModule})
    data: FederatedDataModule = parser.instantiate(parsed)["data"]
    return data


def _parsed(config: Path, groups: dict[str, type]) -> tuple[Parser, Namespace]:
    """Some groups of a run's ``config.yaml``, and their parser."""
    parser = Parser(exit_on_error=False)
    try:
        content = with_current_names(yaml.safe_load(config.read_text()), current_path)
        if "described" not in content:
            for group, kind in groups.items():
                parser.add_group(group, kind, by_name="class_path" in content[group])
            return parser, parser.parse_object({group: content[group] for group in groups})
    except (ArgumentError, KeyError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{config} cannot be read: {error}") from None
    raise ValueError(
        f"{config} describes a run that was started from Python; give its objects: "
        "lcfl.load(run, model=..., method=...)."
    )


@rank_zero_only
def print_evaluation(metrics: dict[str, float], stage: Literal["val", "test"]) -> None:
    """Prints the table of an evaluation, once under torchrun."""
    from lcfl.callbacks.progress import evaluation_table

    rich.print(evaluation_table(metrics, stage))


@rank_zero_only
def _say_once(text: str) -> None:
    print(text)


def _arguments(group: Namespace) -> Namespace:
    """Those of a group's class, whether it is named or not."""
    arguments: Namespace = group.get("init_args", group)
    return arguments


def _keep_functions(parser: LightningArgumentParser, model: Namespace) -> None:
    """Turns functions with ``init_args`` in the place of networks into partials.

    jsonargparse makes a factory of a class, but calls a function at once: its network would be one
    finished object instead of a new one for every model.
    """
    for path in _class_paths(_arguments(model).get("network")):
        module, _, name = path.rpartition(".")  # not pkgutil.resolve_name: lcfl.models.split is a module, too
        made = getattr(import_module(module), name)
        if not isinstance(made, type):
            parser.add_instantiator(_later, made, subclasses=False)


def _made(option: str, kind: type, *args: Any, **kwargs: Any) -> Any:
    with errors_of(option):
        return kind(*args, **kwargs)


def _later(function: Any, *args: Any, **kwargs: Any) -> Any:
    return functools.partial(function, *args, **kwargs)


def _class_paths(config: Any) -> Iterator[str]:
    """Every ``class_path`` in a parsed configuration, at any depth."""
    if isinstance(config, Namespace):
        if "class_path" in config:
            yield config["class_path"]
        config = list(vars(config).values())
    if isinstance(config, list):
        for item in config:
            yield from _class_paths(item)
