"""LightningCLI for a `Federation`, with the option groups trainer, method, model and data."""

import contextlib
import functools
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, Namespace
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

import lcfl
from lcfl.cli.layered_config import LayeredConfig, names_class
from lcfl.cli.parser import Parser, Seed, check_given
from lcfl.cli.type_errors import is_union, without_types
from lcfl.cli.yaml_files import LOADER
from lcfl.core.earlier_versions import with_current_paths
from lcfl.core.files import replacing
from lcfl.core.metric_names import Reported
from lcfl.core.validation import errors_of
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import FederatedDataset
from lcfl.data.partition import Partition
from lcfl.federation.federation import Federation
from lcfl.methods.method import Method
from lcfl.models.module import FederatedModule
from lcfl.runs.result import Run

__all__ = ["FederatedCLI", "class_paths", "instantiate", "instantiate_data", "instantiate_trainer", "main", "refusal"]


class SaveConfig(SaveConfigCallback):
    """Writes ``config.yaml``. It is that of a run from the beginning, even if this one is resumed."""

    def __init__(self, parser: LightningArgumentParser, config: Namespace, **options: Any) -> None:
        started = config.clone()
        started["ckpt_path"] = None
        super().__init__(parser, started, save_to_log_dir=False, **options)

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replaces the file as a whole, because a resumed run has no other copy."""
        with replacing(Path(trainer.log_dir) / self.config_filename) as temporary:
            self.parser.save(self.config, temporary, skip_none=False, multifile=self.multifile)


class FederatedCLI(LightningCLI):
    """The commands ``lcfl fit | validate | test``: LightningCLI with a `Federation` as trainer and a group for methods.

    Args:
        model_class: the class of the module. The arguments may name a subclass with ``--model.class_path``.
        datamodule_class: the class of the data module. The arguments may name a subclass with ``--data.class_path``.
        args: the arguments of the command line; None stands for those of this process.
        options: further options of LightningCLI.
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
        self._first_word = next(iter(words), None)
        defaults: dict[str, Any] = {
            "trainer_class": Federation,
            "parser_class": Parser,
            "parser_kwargs": {"prog": "lcfl"},
            "auto_configure_optimizers": False,
            "load_from_checkpoint_support": False,  # its hooks would be pickled, with the whole CLI, for spawned ranks
            "save_config_callback": SaveConfig,
            "save_config_kwargs": {"overwrite": True},
            # A user-defined class must be named in config.yaml, so that the run can be opened with the same class.
            "subclass_mode_model": model_class is not FederatedModule or names_class(words, "model"),
            "subclass_mode_data": datamodule_class is not FederatedDataModule or names_class(words, "data"),
        }
        super().__init__(model_class, datamodule_class, args=args, **defaults | options)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Returns a parser whose ``-c`` files are layers, as `LayeredConfig` defines them."""
        parser: LightningArgumentParser = self.parser_class(dump_header=[f"lcfl {lcfl.__version__}"], **kwargs)
        parser.add_argument(
            "-c",
            "--config",
            action=LayeredConfig,
            help="a YAML file, which overrides the files given before it",
        )
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the seed. Unlike that of LightningCLI it is always a number, so that every run records its seed."""
        parser.add_argument(
            "--seed_everything",
            type=Seed,
            default=0,
            help="Seed of everything random except the partition, which uses data.seed.",
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the four groups. The trainer has no option for the seed, which is `seed_everything`."""
        parser.add_class_arguments(
            self.trainer_class, "trainer", skip={"seed"}, instantiate=False, fail_untyped=False, sub_configs=True
        )
        parser.set_defaults({f"trainer.{k}": v for k, v in self.trainer_defaults.items() if k != "callbacks"})
        assert isinstance(parser, Parser)
        parser.add_group("method", Method)
        parser.add_group("model", self._model_class, self.subclass_mode_model)
        parser.add_group("data", self._datamodule_class, self.subclass_mode_data)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Returns the commands, each with those of its arguments that are groups and not options.

        If the first argument is a command, it is the only one, because the parser of a command takes long to make.
        """
        groups = {"model", "datamodule", "method"}
        commands = {"fit": {*groups, "transport"}, "validate": groups, "test": groups}
        return {name: each for name, each in commands.items() if name == self._first_word} or commands

    def before_instantiate_classes(self) -> None:
        """Checks the configuration and prepares how classes are instantiated.

        Errors of data classes name their option. A function given as a network is not called yet.
        """
        for option, kind in {"data.dataset": FederatedDataset, "data.partition": Partition}.items():
            self.parser.add_instantiator(functools.partial(_instantiated, option), kind)
        kinds: dict[str, type] = {"trainer": Federation, "method": Method}
        kinds |= {"model": self._model_class, "data": self._datamodule_class}
        for group, its_class in kinds.items():
            check_given(self._get(self.config, group), group, its_class)
        _keep_functions(self.parser, self._get(self.config, "model"))

    def instantiate_classes(self) -> None:
        """Builds all parts. If one refuses its arguments, its reason is the message."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            if not is_union(str(error)):
                raise
            raise ValueError(without_types(str(error))) from error
        parser = self._parser(self.subcommand)
        assert isinstance(parser, Parser)
        for name, value in parser.pulls.items():
            _warn_if_dropped(self.model, name, value, self._get(self.config, "model"))

    def instantiate_trainer(self, **kwargs: Any) -> Federation:  # type: ignore[override]
        """Returns the federation, with the seed."""
        trainer: Any = super().instantiate_trainer(seed=int(self._get(self.config, "seed_everything")), **kwargs)
        assert isinstance(trainer, Federation)
        return trainer

    def fit(self, **arguments: Any) -> None:
        """Trains. If a signal stops the run, the process exits with status 128 + the number of the signal."""
        self.result = self.trainer.fit(**arguments)
        if self.result.signal:
            sys.exit(128 + self.result.signal)
        if self.trainer.fast_dev_run:
            _print_once("fast_dev_run: one round on random data succeeded; nothing was saved")

    def validate(self, **arguments: Any) -> None:
        """Evaluates the validation data and prints the table."""
        self.result = self.trainer.validate(**arguments)
        print_evaluation(self.result, "val", self.model.reported)

    def test(self, **arguments: Any) -> None:
        """Evaluates the test data and prints the table."""
        self.result = self.trainer.test(**arguments)
        print_evaluation(self.result, "test", self.model.reported)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = super()._prepare_subcommand_kwargs(subcommand)
        return kwargs | {"method": self._get(self.config_init, "method")}

    def _parse_ckpt_path(self) -> None:
        """Does nothing. LightningCLI would open the checkpoint and let its content override the command line."""


def _warn_if_dropped(model: FederatedModule, name: str, value: float, given: Namespace) -> None:
    """Warns if a module has another weight of a pull than the configuration, because it has no argument for it."""
    if name not in _arguments(given) and getattr(model, name, value) != value:
        kind = type(model).__name__
        warnings.warn(
            f"model.{name}: a configuration sets it to {value}, but {kind} has no such argument and trains with "
            f"{getattr(model, name)}. Let __init__ of {kind} take **options, and pass them to super().__init__.",
            stacklevel=2,
        )


def main(args: list[str] | None = None) -> Run | dict[str, float]:
    """Runs ``lcfl <args>`` and returns the run of ``fit``, or the metrics of ``validate`` and ``test``.

    Args:
        args: the arguments of the command line; None stands for those of this process.
    """
    _quieten_lightning()
    ours = logging.getLogger("lcfl")
    if not ours.hasHandlers():
        ours.addHandler(logging.StreamHandler())
        ours.setLevel(logging.INFO)
    return FederatedCLI(args=args).result


def refusal(args: list[str]) -> str:
    """Returns why ``lcfl fit <args>`` would be refused before its data are read; an empty text if it would not be."""
    _quieten_lightning()
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(printed):
            warnings.simplefilter("ignore")  # the run itself prints them
            _CheckingCLI(args=["fit", *args])
    except SystemExit:
        message, _, _ = printed.getvalue().partition("lcfl: error: ")[2].strip().rpartition("\n")  # the last is --help
        return message
    except Exception as error:  # of any kind, because it may come from a user's class
        return str(error) or type(error).__name__
    return ""


class _CheckingCLI(FederatedCLI):
    """Checks the configuration of ``lcfl fit`` instead of training."""

    def fit(self, **arguments: Any) -> None:
        """Checks the parts together."""
        self.trainer.check(*(arguments[part] for part in ("model", "datamodule", "method")))


def instantiate(config: Path, with_weights: bool = False) -> tuple[FederatedModule, Method]:
    """Builds the module and the method of a run's ``config.yaml``, without its data and its trainer.

    Args:
        config: the file.
        with_weights: whether to read the weights of ``model.init_from``. All models of a run are in its checkpoints.

    Raises:
        ValueError: if the run was not started from the command line, or the file does not fit this version.
    """
    parser, parsed = _parsed(config, {"method": Method, "model": FederatedModule})
    if not with_weights and "init_from" in (arguments := _arguments(parsed["model"])):
        arguments["init_from"] = arguments["init_except"] = None
    _keep_functions(parser, parsed["model"])
    instances = parser.instantiate(parsed)
    return instances["model"], instances["method"]


def instantiate_trainer(config: Path) -> Federation:
    """Builds the federation of a run's ``config.yaml``.

    Raises:
        ValueError: if the file does not fit this version.
    """
    parser, parsed = _parsed(config, {"trainer": Federation})
    federation: Federation = parser.instantiate(parsed)["trainer"]
    federation.seed = yaml.load(config.read_bytes(), LOADER).get("seed_everything", 0)
    return federation


def instantiate_data(config: Path, changes: Mapping[str, Any] | None = None) -> FederatedDataModule:
    """Builds the data module of a run's ``config.yaml``, without setting it up.

    Args:
        config: the file.
        changes: arguments that replace those in the file.

    Raises:
        ValueError: if the run was not started from the command line, or the file does not fit this version.
    """
    parser, parsed = _parsed(config, {"data": FederatedDataModule}, changes)
    data: FederatedDataModule = parser.instantiate(parsed)["data"]
    return data


def _parsed(
    config: Path, groups: dict[str, type], changes: Mapping[str, Any] | None = None
) -> tuple[Parser, Namespace]:
    """Returns a parser for some groups of a run's ``config.yaml``, and the parsed groups with these changes."""
    parser = Parser(exit_on_error=False)
    try:
        content = yaml.load(config.read_bytes(), LOADER)
        if not isinstance(content, dict):
            raise TypeError("it is empty or no mapping")
        content = with_current_paths(content)
        if "described" not in content:
            for group, kind in groups.items():
                parser.add_group(group, kind, by_name="class_path" in content[group])
                if changes and "class_path" in content[group]:
                    content[group].setdefault("init_args", {}).update(changes)
                elif changes:
                    content[group].update(changes)
            return parser, parser.parse_object({group: content[group] for group in groups})
    except (ArgumentError, KeyError, TypeError, yaml.YAMLError) as error:
        if missing := re.search(r"No module named '([^']+)'", str(error)):
            raise ValueError(
                f"{config} names the module {missing[1]}, which is not found. Run the command in the folder that holds "
                f"{missing[1].partition('.')[0]}, or add this folder to PYTHONPATH."
            ) from None
        raise ValueError(f"{config} cannot be read: {error}") from None
    raise ValueError(
        f"{config} belongs to a run that was started from Python, so no command can build its model and method. In "
        "Python, lcfl.load(run, model=..., method=...) opens it, and model(...) of what it returns is a network to "
        "predict with or to save."
    )


@rank_zero_only
def print_evaluation(metrics: dict[str, float], stage: Literal["val", "test"], reported: Reported) -> None:
    """Prints the tables of an evaluation. Under torchrun, only rank 0 prints them."""
    from lcfl.callbacks.progress import evaluation_tables, make_console

    for table in evaluation_tables(metrics, stage, reported):
        make_console().print(table)


def _quieten_lightning() -> None:
    if not os.environ.get("LCFL_DEBUG"):  # messages about the seed are of no interest
        for name in ("lightning.fabric", "lightning.pytorch"):
            logging.getLogger(name).setLevel(logging.WARNING)


@rank_zero_only
def _print_once(text: str) -> None:
    print(text)


def _arguments(group: Namespace) -> Namespace:
    """Returns the arguments of the class of a group, whether the class is named or not."""
    arguments: Namespace = group.get("init_args", group)
    return arguments


def _keep_functions(parser: LightningArgumentParser, model: Namespace) -> None:
    """Turns functions that are given as networks, with their ``init_args``, into partials.

    jsonargparse turns a class into a factory, but calls a function at once. All models would then share one network
    instead of each having a new one.
    """
    for path in class_paths(_arguments(model).get("network")):
        module, _, name = path.rpartition(".")  # not pkgutil.resolve_name, because lcfl.models.split is also a module
        network = getattr(import_module(module), name)
        if not isinstance(network, type):
            parser.add_instantiator(_deferred, network, subclasses=False)


def _instantiated(option: str, kind: type, *args: Any, **kwargs: Any) -> Any:
    with errors_of(option):
        return kind(*args, **kwargs)


def _deferred(function: Any, *args: Any, **kwargs: Any) -> Any:
    return functools.partial(function, *args, **kwargs)


def class_paths(config: Any) -> Iterator[str]:
    """Yields every ``class_path`` in a parsed configuration, at any depth."""
    if isinstance(config, Namespace):
        if "class_path" in config:
            yield config["class_path"]
        config = list(vars(config).values())
    if isinstance(config, list):
        for item in config:
            yield from class_paths(item)
