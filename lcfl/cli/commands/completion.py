"""``lcfl completion SHELL``: prints the script that completes commands, options and classes of lcfl in a shell."""

import argparse
import inspect
import pkgutil
import types
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from lcfl.cli import commands

__all__ = ["main", "mirror", "parser"]

SHELLS = ("bash", "zsh", "fish")
TRAINING = ("fit", "validate", "test")  # the commands of LightningCLI


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    options = argparse.ArgumentParser(
        prog="lcfl completion",
        description="Prints a script with which the shell completes lcfl's commands, options and classes.",
        epilog="It needs the package shtab: pip install 'lcfl[completion]'.",
        allow_abbrev=False,
    )
    options.add_argument("shell", choices=SHELLS, help="the shell")
    return options


def main(args: Sequence[str]) -> None:
    """Prints the script.

    Raises:
        ModuleNotFoundError: if shtab is not installed.
    """
    shell = parser().parse_args(args).shell
    try:
        import shtab
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "completion: the package shtab is missing. Install it: pip install 'lcfl[completion]'."
        ) from None
    print(shtab.complete(mirror(), shell))


def mirror() -> argparse.ArgumentParser:
    """Returns a parser with all commands, their options, and the values to choose from.

    Unlike the real parsers, it is a plain parser of argparse with one short help text for each option, and it has the
    arguments of lcfl's classes as options, such as ``--data.partition.alpha``.
    """
    from jsonargparse import capture_parser

    from lcfl.cli.federated_cli import FederatedCLI

    training = capture_parser(FederatedCLI)._subcommands_action.choices  # type: ignore[union-attr]
    given = {name: [training[name]] for name in TRAINING}
    for module in pkgutil.iter_modules(commands.__path__):
        given[module.name] = [import_module(f"{commands.__name__}.{module.name}").parser()]
    given["sweep"].append(training["fit"])  # it passes on what it does not know

    whole = argparse.ArgumentParser(prog="lcfl")
    whole.add_argument("--version", action="store_true", help="print the version")
    subparsers = whole.add_subparsers()
    for name, sources in given.items():
        copied = subparsers.add_parser(name, help=sources[0].description, add_help=False)
        for source in sources:
            _copy(source, copied)
        _add_arguments_of_classes(copied)
    return whole


def _copy(source: argparse.ArgumentParser, copied: argparse.ArgumentParser) -> None:
    """Adds the arguments of a parser to another one that does not have them."""
    import shtab

    from lcfl.cli.option_help import Help, first_sentence, options

    known = options(source)
    groups = dict.fromkeys(name.partition(".")[0] for name in known if "." in name)
    for action in [*known.values(), *(each for each in source._actions if not each.option_strings)]:
        flags = [flag for flag in action.option_strings if flag not in copied._option_string_actions]
        if not flags and action.option_strings:
            continue
        choices = [*groups, *known] if isinstance(action, Help) else _values(action)
        has_value = bool(choices) or (action.nargs != 0 and action.default != argparse.SUPPRESS)
        new: Any = copied.add_argument(
            *(flags or [action.dest]),
            help=first_sentence(action),
            **({"nargs": "?", "choices": choices or None} if has_value else {"action": "store_true"}),
        )
        if has_value and not choices and _is_path(action):
            new.complete = shtab.FILE


def _add_arguments_of_classes(copied: argparse.ArgumentParser) -> None:
    """Adds the arguments of lcfl's classes for the options of a parser, as options."""
    from lcfl.cli.class_options import CLASSES, classes
    from lcfl.cli.option_paths import without_init_args

    for path in CLASSES:
        option = f"--{without_init_args(path)}"
        if option not in copied._option_string_actions:
            continue
        owners: dict[str, list[str]] = {}
        for name, kind in classes(path).items():
            for argument in inspect.signature(kind).parameters:
                owners.setdefault(argument, []).append(name)
        for argument, names in owners.items():
            flag = f"{option}.{argument}"
            if flag not in copied._option_string_actions:
                nested = next((each for each in CLASSES if f"--{without_init_args(each)}" == flag), "")
                copied.add_argument(flag, help=f"of {', '.join(names)}", choices=list(classes(nested)) or None)


def _values(action: argparse.Action) -> list[str]:
    """Returns the values to choose from; none if others are allowed, too, or if they are not listed."""
    from lcfl.cli.class_options import OTHERS, classes

    option = action.option_strings[0].lstrip("-") if action.option_strings else ""
    if option in OTHERS:
        return [OTHERS[option]]
    return list(classes(option)) or [*(action.choices or _literals(getattr(action, "_typehint", None)))]


def _literals(hint: Any) -> list[str]:
    if get_origin(hint) in (Union, types.UnionType):
        return [value for each in get_args(hint) for value in _literals(each)]
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    return ["true", "false"] if hint is bool else []


def _is_path(action: argparse.Action) -> bool:
    hint = getattr(action, "_typehint", action.type)
    return Path in (hint, *get_args(hint)) or action.dest in ("config", "out")
