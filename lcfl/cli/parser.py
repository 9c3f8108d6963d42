"""The parser of the command line: which classes go by their short names, and errors that say what was meant."""

import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from inspect import Parameter
from typing import Any, NoReturn

from jsonargparse import Namespace
from jsonargparse.typing import restricted_number_type
from lightning.pytorch.cli import LightningArgumentParser

import lcfl.callbacks
import lcfl.data.augmentation
import lcfl.data.datasets
import lcfl.data.partition
import lcfl.data.transforms
import lcfl.methods.aggregation
import lcfl.methods.clustering
import lcfl.methods.exchange
import lcfl.methods.exchange.transforms
import lcfl.methods.local
import lcfl.models
from lcfl.cli.layered_config import as_layers
from lcfl.core.renamed import current_path

__all__ = ["Parser", "Seed", "check_given"]

# The modules whose classes can be named without their module; a misspelt name is compared with theirs.
PARTS = {
    "trainer.callbacks": lcfl.callbacks,
    "method.local_update": lcfl.methods.local,
    "method.exchange": lcfl.methods.exchange,
    "method.exchange.init_args.transforms": lcfl.methods.exchange.transforms,
    "method.aggregation": lcfl.methods.aggregation,
    "method.clustering": lcfl.methods.clustering,
    "model.network": lcfl.models,
    "data.dataset": lcfl.data.datasets,
    "data.dataset.init_args.augmentation": lcfl.data.augmentation,
    "data.partition": lcfl.data.partition,
    "data.client_transforms": lcfl.data.transforms,
}
# Here and not where it is used: a spawned rank gets the parser pickled, and must find the type that its options have.
Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)], docstring="An integer from 0 to 2**32 - 1")
RENAMED = {"trainer.seed": "seed_everything", "seed": "seed_everything"}
CLASSES = (*PARTS, "model.optimizer", "model.loss", "model.metrics", "trainer.logger")  # options that take a class


class Parser(LightningArgumentParser):
    """A parser that knows the items of lists, and whose errors are one message that says what was meant, perhaps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if os.getcwd() not in sys.path:  # own classes beside the configuration, also for the installed command
            sys.path.append(os.getcwd())

    def add_group(self, group: str, kind: type, by_name: bool = False) -> None:
        """The arguments of a class as a group of options; with `by_name` those of the subclass that the group names."""
        if by_name:
            self.add_subclass_arguments(kind, group, fail_untyped=False)
            self.set_defaults({group: {"class_path": f"{kind.__module__}.{kind.__qualname__}"}})
        else:
            self.add_class_arguments(kind, group, fail_untyped=False, sub_configs=True)

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Namespace:  # type: ignore[override]
        """As jsonargparse's; ``--list.0.argument=value`` changes one item."""
        return super().parse_args(as_layers(sys.argv[1:] if args is None else args, CLASSES), *more, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends with status 2; of a misspelt class or option the message names the closest ones."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        self.exit(2, f"lcfl: error: {_explained(message, parser)}\n{program} --help shows all options.\n")


def check_given(config: Any, option: str) -> None:
    """Refuses classes without an argument that they need and give no type: the parser would pass None for it.

    Raises:
        ValueError: names the first such argument.
    """
    if isinstance(config, list):
        for number, item in enumerate(config):
            check_given(item, f"{option}.{number}")
    if not isinstance(config, Namespace):
        return
    if "class_path" in config:
        given = config.get("init_args") or Namespace()  # type: ignore[no-untyped-call]
        for name, parameter in _parameters(config["class_path"]).items():
            is_bare = parameter.default is parameter.annotation is Parameter.empty
            if is_bare and name in given and given[name] is None:
                raise ValueError(
                    f"{option}: {config['class_path']} needs {name}: set {option}.init_args.{name}. It has neither "
                    "type nor default in the code, so null counts as nothing."
                )
    for name, value in vars(config).items():
        check_given(value, f"{option}.{name}")


def _explained(message: str, parser: LightningArgumentParser) -> str:
    """A parser's message, in better words where it is about a misspelt name."""
    option = ".init_args.".join(re.findall(r'Parser key "([\w.]+)"', message))
    for path in re.findall(r"\blcfl(?:\.\w+)+", message):
        if (now := current_path(path)) != path:
            return f"{option}: {path} is an import path of lcfl 0.1; now it is {now}."
    if found := re.search(r"Expected a dot import path string: (\w+)", message):
        known = _classes(option)
        return (
            f"{option}: there is no class {found[1]!r}.{_closest(found[1], known)} Classes of lcfl: "
            f"{', '.join(known)}; any other one needs its import path, package.module.Class."
        )
    if found := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        known = [name for name in dir(sys.modules[found[1]]) if not name.startswith("_")]
        return f"{option}: there is no {found[2]!r} in {found[1]}.{_closest(found[2], known)}"
    if found := re.search(r"(?:unrecognized arguments: --|does not accept option ')([\w.]+)", message):
        known = [action.dest for action in parser._actions if action.option_strings]
        return f"{message.strip()}.{_closest(RENAMED.get(found[1], found[1]), known, cutoff=0.75)}"
    if "does not correspond to a subclass of Callback" in message:
        return (
            f"{message.strip()}\nCallbacks of lightning.Trainer would never be called; derive yours from lcfl.Callback."
        )
    if found := re.search(r"([\w.]+) does not correspond to a subclass of (Federated\w+)", message):
        return f"{option}: got {found[1]}; allowed is {found[2]} and what derives from it."
    return _located(message.strip())


def _located(message: str) -> str:
    """A message that the parser nests, class within class, as one about the innermost option."""
    options, kind, message = _peeled(message)
    if found := re.search(r"Problem with given class_path '([\w.]+)':\s+", message):  # of a union that has other types
        inner, inner_kind, message = _peeled(message[found.end() :])
        options, kind, message = options + inner, inner_kind or found[1], message.partition("\n")[0]
    option = ".init_args.".join(options)
    message = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", message)
    message = message.replace("NoneType", "null").replace("a Sequence", "a list").replace("a typing.Literal", "one of ")
    if not option:
        return message
    if kind and (found := re.match(r"Option '(\w+)' is not accepted", message)):
        known = list(_parameters(kind))
        return (
            f"{option}: {kind} has no argument {found[1]!r}.{_closest(found[1], known)} Its arguments: "
            f"{', '.join(known) or 'none'}."
        )
    if kind and (found := re.match(r"the following arguments are required: (.+)", message)):
        return f"{option}: {kind} needs {found[1]}: set {option}.init_args.{found[1].split(', ')[0]}."
    return f"{option}: {message}"


def _peeled(message: str) -> tuple[list[str], str, str]:
    """The options that a message is nested in, the class that the innermost one names, and what is said of it."""
    options: list[str] = []
    kind = ""
    nested = r"""\s*Parser key "([\w.]+)":\s+(?:Problem with given class_path '([\w.]+)':\s+)?"""
    while found := re.match(nested, message):
        options, kind, message = [*options, found[1]], found[2], message[found.end() :]
    return options, kind, message


def _parameters(kind: str) -> Mapping[str, Parameter]:
    """What the class or function at an import path can be called with; nothing where that cannot be read."""
    module, _, name = kind.rpartition(".")
    try:
        return inspect.signature(getattr(import_module(module), name)).parameters
    except (ImportError, TypeError, ValueError):  # a method of a class, or a builtin
        return {}


def _closest(name: str, known: list[str], cutoff: float = 0.6) -> str:
    close = get_close_matches(name, known, n=2, cutoff=cutoff)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _classes(key: str) -> list[str]:
    """The classes that lcfl has for an option or one below it, all of them for an option of another kind."""
    key = re.sub(r"^(model|data)\.init_args\.", r"\1.", key)  # where the group's class is named
    groups = sorted((name for name in PARTS if f"{key}.".startswith(f"{name}.")), key=len)
    modules = [PARTS[groups[-1]]] if groups else list(PARTS.values())
    found = {name: getattr(module, name) for module in modules for name in module.__all__}
    return [name for name, made in found.items() if isinstance(made, type) and not inspect.isabstract(made)]
