"""The parser of the command line. It accepts short names of classes and explains misspelt names."""

import argparse
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from inspect import Parameter
from math import isfinite
from typing import Any, NoReturn

import torch
from jsonargparse import Namespace
from jsonargparse.typing import register_type, restricted_number_type
from lightning.pytorch.cli import LightningArgumentParser
from torch import Tensor

from lcfl.cli import option_help
from lcfl.cli.class_options import CLASSES, PARTS, classes, closest
from lcfl.cli.error_lines import origin_of
from lcfl.cli.layered_config import as_layers
from lcfl.cli.option_paths import without_init_args
from lcfl.cli.shipped_configs import configurations
from lcfl.cli.type_errors import is_union, without_types
from lcfl.core.earlier_versions import RENAMED_CLASSES, current_path
from lcfl.core.validation import check_values, shortened, signature_of
from lcfl.federation.settings import in_place_of

__all__ = ["Parser", "Seed", "check_given", "explained"]

# Defined here and not where it is used, because a spawned rank unpickles the parser and must find the type.
Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)], docstring="An integer from 0 to 2**32 - 1")
RENAMED = {"trainer.seed": "seed_everything", "seed": "seed_everything"}
NEEDS = r"the following arguments are required: ([\w, ]+)"
VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _tensor(numbers: Any) -> Tensor:
    """Returns the tensor that a list of numbers stands for, such as the weights of classes in a loss."""
    if not isinstance(numbers, list):
        raise TypeError(f"{numbers} is no list")
    return torch.tensor(numbers, dtype=torch.float32)


register_type(Tensor, Tensor.tolist, _tensor)


class Parser(LightningArgumentParser):
    """A parser that can change single items of lists. Its errors are one message, which suggests the closest names.

    Attributes:
        pulls: the arguments of the model that a method sets, as the last layer with them has them. jsonargparse drops
            them without a word if a model is named later that has no such arguments.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "add_help": False, **options})
        self.add_argument("-h", "--help", action=option_help.Help)
        self.pulls: dict[str, float] = {"cluster_weight": 0, "global_weight": 0}
        if os.getcwd() not in sys.path:  # the installed command, too, must find classes in the current folder
            sys.path.append(os.getcwd())

    def add_group(self, group: str, kind: type, by_name: bool = False) -> None:
        """Adds the arguments of a class as a group of options.

        Args:
            group: the name of the group.
            kind: the class.
            by_name: whether the group names a subclass of `kind`, whose arguments are then the options.
        """
        if by_name:
            self.add_subclass_arguments(kind, group, fail_untyped=False)
            self.set_defaults({group: {"class_path": f"{kind.__module__}.{kind.__qualname__}"}})
        else:
            self.add_class_arguments(kind, group, fail_untyped=False, sub_configs=True)

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Namespace:  # type: ignore[override]
        """Parses arguments as jsonargparse does, and accepts ``--list.0.argument=value`` for one item of a list."""
        return super().parse_args(as_layers(sys.argv[1:] if args is None else args, CLASSES), *more, **options)

    def format_help(self, formatter: argparse.HelpFormatter | None = None) -> str:
        """Returns the help of a command, or that of a class, for which ``--option.help CLASS`` asks."""
        if self._subcommands_action is not None:
            return super().format_help(formatter)
        if getattr(self, "_inner_parser", False):
            lines = [line for action in option_help.options(self).values() for line in option_help.entry(action)]
            return "\n".join([f"{self.description}", *lines, ""])
        return option_help.overview(self)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exits with status 2. For a misspelt class or option, the message suggests the closest names."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        if match := re.fullmatch(r"the following arguments are required: (\w+)\.(.+)", message.strip()):
            program, message = f"{program} {match[1]}", _missing(match[2].replace(f" {match[1]}.", " "))
        place = "" if ex is None else origin_of(_innermost(ex))
        self.exit(2, f"lcfl: error: {explained(message, parser)}{place}\n{program} --help shows all options.\n")


def _innermost(error: BaseException) -> BaseException:
    """Returns the error for which others were raised, one after the other."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def check_given(config: Any, option: str, kind: type | None = None) -> None:
    """Checks that every number is finite, and that null is given only for arguments that may be null.

    The parser accepts null for every argument, and passes it for one that is missing and has no type.

    Args:
        config: the parsed configuration of the option.
        option: the name of the option, for the message.
        kind: the class whose arguments `config` holds, if it does not name the class.

    Raises:
        ValueError: names the first option with such a value.
    """
    if isinstance(config, float) and not isfinite(config):
        raise ValueError(f"{option}: got {config}; it must be a finite number.")
    if isinstance(config, list | dict):
        for key, item in enumerate(config) if isinstance(config, list) else config.items():
            check_given(item, f"{option}.{key}")
    if not isinstance(config, Namespace):
        return
    named = config.get("class_path")
    given = (config.get("init_args") or Namespace()) if named else config  # type: ignore[no-untyped-call]
    for name, parameter in _parameters(named or kind).items():
        if name not in given or given[name] is not None or parameter.default is None:
            continue
        argument = f"{option}.init_args.{name}" if named else f"{option}.{name}"
        if parameter.default is parameter.annotation is Parameter.empty:
            raise ValueError(
                f"{option}: {named} needs {name}: set {argument}. It has neither a type nor a default in the "
                "code, so null counts as missing."
            )
        check_values(argument, {name: (parameter.annotation, None)})
    for name, value in vars(config).items():
        check_given(value, f"{option}.{name}")


def _missing(options: str) -> str:
    """Returns what to do about required options that have no value."""
    whole = configurations() / "quickstart.yaml"
    return (
        f"{options}: no value is given. Add a configuration with -c, such as {whole}, or one of each of the folders "
        "data and methods next to it. That of a run is its config.yaml."
    )


def explained(message: str, parser: LightningArgumentParser) -> str:
    """Returns a message of the parser, with a clearer wording if it is about a misspelt name."""
    option = ".init_args.".join(re.findall(r'Parser key "([\w.]+)"', message))
    takes_class = without_init_args(option) in map(without_init_args, CLASSES)
    for path in re.findall(r"\blcfl(?:\.\w+)+", message):
        if (now := current_path(path)) != path:
            return f"{option}: {path} is an import path of lcfl 0.1; its name is now {now}."
    if said := _without_class(option, message, takes_class):
        return said
    if match := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        known = [name for name in dir(sys.modules[match[1]]) if not name.startswith("_")]
        return f"{option}: there is no {match[2]!r} in {match[1]}.{closest(match[2], known)}"
    if match := re.search(r"(?:unrecognized arguments: --|does not accept option ')([\w.]+)", message):
        known = [action.dest for action in parser._actions if action.option_strings]
        if instead := in_place_of(match[1].removeprefix("trainer.")):
            return f"{message.strip()}.{instead}"
        return f"{message.strip()}.{_meant(RENAMED.get(match[1], match[1]), known)}"
    if "does not correspond to a subclass of Callback" in message:
        got = message.rstrip().rpartition("Given value: ")[2]
        return (
            f"{option}: got {got}, which is no callback of lcfl. Callbacks of lightning.Trainer are never called; "
            "derive your class from lcfl.Callback."
        )
    if match := re.search(r"but got NestedArg\(key='([\w.]+)', val='(.*?)'\)", message):
        return (
            f"{option}: got {match[1]}={match[2]} for a function. Name it together with its arguments: "
            f"--{option}='{{class_path: package.function, init_args: {{{match[1]}: {match[2]}}}}}'."
        )
    if match := re.search(r"([\w.]+) does not correspond to a subclass of (Federated\w+)", message):
        return f"{option}: got {match[1]}; allowed are {match[2]} and its subclasses."
    if match := re.search(r"Option '(\w+)' is not accepted\. Got value: Namespace\(class_path='([\w.]+)'", message):
        return _unknown(option, match[2], match[1])
    passed = rf"Callable\[\.\.\., [\w.]+\] expects a function or a callable class: {NEEDS}\. Got value: Namespace"
    if match := re.search(rf"{passed}\(class_path='([\w.]+)'", message):
        return (
            f"{option}: {match[2]} is a class that the code itself calls with {match[1]}. A configuration cannot hold "
            "it, not even as a default. Write a function that has only the arguments that you set, and calls the "
            f"original with them, and name it in {option.rpartition('.init_args.')[0]}."
        )
    if match := re.search(rf"{NEEDS}\. Got value: Namespace\(class_path='([\w.]+)'", message):
        return _needed(option, match[2], match[1])
    return _located(without_types(message).strip())


def _meant(option: str, known: Sequence[str]) -> str:
    """Returns a question that suggests the options closest to a misspelt one, with the argument of a class."""
    group, *rest = option.split(".")
    name, argument = ".".join([group, *rest[:1]]), rest[1:]
    options = [each for each in known if not each.endswith(".help")]
    close = get_close_matches(name, options, n=2, cutoff=0.75)
    return closest(option, [".".join([each, *argument * (f"{each}.help" in known)]) for each in close], cutoff=0)


def _without_class(option: str, message: str, takes_class: bool) -> str:
    """Returns a message about a class that is misspelt, or not named although its arguments are; else an empty text."""
    if re.search(r"'init_args': .*\n\s*Subclass types expect one of|class_path='torch\.nn\.Module'\)$", message):
        return f"{option}: got init_args, but no class. Add its class_path, or give this layer after one that names it."
    if match := re.search(
        r"(?:Unexpected import path format|Config file loop detected): (.*?)(?: -> .*)?$", message, re.M
    ):
        return (
            f"{option}: got {shortened(match[1], 90)}, which names no class. Give the name of a class. If it is a "
            "file of data, give it as an argument of the data set's class."
        )
    match = re.search(r"Expected a dot import path string: (\w+)", message)
    nested = re.search(r"Given value: NestedArg\(key='(\w+)\.(?:init_args\.)?([\w.]+)', val='(.*?)'\)", message)
    if nested and (match or "Not a valid subclass" in message):
        name, argument, value = f"--{option}.{nested[1]}", nested[2], nested[3]
        return f"{option}: got {argument}={value} for no class. Name it first: {name}=CLASS {name}.{argument}={value}"
    if match and (takes_class or not is_union(message)):
        if now := RENAMED_CLASSES.get(match[1]):
            return f"{option}: {match[1]} is a name of lcfl 0.1; it is now {now}."
        known = list(classes(option))
        if places := [each for each in PARTS if match[1] in classes(each)]:
            return f"{option}: {match[1]} is no class for this option, but for {' and '.join(places)}."
        ours = f"{closest(match[1], known)} Classes of lcfl: {', '.join(known)}; any other class" if known else " It"
        return f"{option}: there is no class {match[1]!r}.{ours} needs its import path, package.module.Class."
    return ""


def _located(message: str) -> str:
    """Turns a message that the parser nests, class within class, into one about the innermost option."""
    options, kind, message = _peeled(message)
    if match := re.search(
        r"Problem with given class_path '([\w.]+)':\s+", message
    ):  # comes from a union with other types
        inner, inner_kind, message = _peeled(message[match.end() :])
        options, kind, message = options + inner, inner_kind or match[1], message.partition("\n")[0]
    option = ".init_args.".join(options)
    message = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", message)
    message = message.replace("NoneType", "null").replace("a Sequence", "a list").replace("a typing.Literal", "one of ")
    if not option:
        return message
    if kind and (match := re.match(r"Option '(\w+)' is not accepted", message)):
        return _unknown(option, kind, match[1])
    if kind and (match := re.match(NEEDS, message)):
        return _needed(option, kind, match[1])
    return f"{option}: {without_types(message)}"


def _needed(option: str, kind: str, arguments: str) -> str:
    return f"{option}: {kind} needs {arguments}: set {option}.init_args.{arguments.split(', ')[0]}."


def _unknown(option: str, kind: str, argument: str) -> str:
    known = list(_parameters(kind))
    more = f" It takes others, too: give {argument!r} in dict_kwargs beside init_args." if _is_open(kind) else ""
    if base := _base_with(argument, kind):
        more = f" {base} has it: let __init__ of {kind} take **options, and pass them to super().__init__."
    return (
        f"{option}: {kind} has no argument {argument!r}.{closest(argument, known)} Its arguments: "
        f"{', '.join(known) or 'none'}.{more}"
    )


def _is_open(kind: str) -> bool:
    """Returns whether a function at an import path takes any argument by name."""
    function = _at(kind)
    return inspect.isfunction(function) and inspect.getfullargspec(function).varkw is not None


def _base_with(argument: str, kind: str) -> str:
    """Returns the name of a base class with an argument that the user's class at an import path does not pass on."""
    if kind.partition(".")[0] in ("lcfl", "torch", "torchvision", "torchmetrics"):
        return ""
    bases = getattr(_at(kind), "__mro__", ())[1:]
    return next((base.__name__ for base in bases if argument in _parameters(base)), "")


def _at(path: str) -> Any:
    """Returns what is at an import path; None for nothing."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def _peeled(message: str) -> tuple[list[str], str, str]:
    """Returns the options that a message is nested in, the class of the innermost one, and the remaining message."""
    options: list[str] = []
    kind = ""
    nested = r"""\s*Parser key "([\w.]+)":\s+(?:Problem with given class_path '([\w.]+)':\s+)?"""
    while match := re.match(nested, message):
        options, kind, message = [*options, match[1]], match[2], message[match.end() :]
    return options, kind, message


def _parameters(kind: Any) -> Mapping[str, Parameter]:
    """Returns the parameters of a class or function, or of the one at an import path; none if they cannot be read.

    If a class has ``**options``, those of its base class are included.
    """
    found: dict[str, Parameter] = {}
    try:
        if isinstance(kind, str):
            kind = _at(kind)
        for each in getattr(kind, "__mro__", (kind,)):
            parameters = signature_of(each).parameters.values()
            found = {each.name: each for each in parameters if each.kind not in VARIADIC} | found
            if all(each.kind is not Parameter.VAR_KEYWORD for each in parameters):
                break
    except (TypeError, ValueError):  # the path leads to a method of a class or to a builtin
        pass
    return found
