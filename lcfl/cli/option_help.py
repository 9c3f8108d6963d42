"""The texts of ``--help``: one line per option, and everything about one option, group or class."""

import argparse
import collections.abc
import inspect
import re
import shutil
import textwrap
import types
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ActionConfigFile, ArgumentParser  # type: ignore[attr-defined]
from jsonargparse._required import restore_suppressed_required

from lcfl.cli.class_options import CLASSES, OTHERS, classes, closest
from lcfl.cli.option_paths import without_init_args
from lcfl.cli.type_errors import WORDS

__all__ = ["Help", "described", "entry", "first_sentence", "options", "overview"]

COLUMN = 34  # where the descriptions of options begin
SECTION = re.compile(r"^(?:Args|Attributes|Examples?|Note|Raises|Returns|\.\. |[*-] )", re.MULTILINE)  # in a docstring
YAML = {"None": "null", "True": "true", "False": "false"}
LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)


class Help(argparse._HelpAction):
    """The action of ``--help [PATH]``. The path is that of an option or a group, or ``OPTION=CLASS``."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, help="this help, or that of one option, group or class: see below")
        self.nargs, self.metavar = "*", "PATH"

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Prints the help and exits."""
        path = " ".join(values)
        try:
            with restore_suppressed_required():  # no option counts as required while a command is parsed
                text = described(parser, path) if path else parser.format_help()
        except ValueError as error:
            parser.error(f"--help {path}: {error}")
        print(text, end="")
        parser.exit()


def options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Returns the options of a parser by their names, without those that name a file for a group or show help."""
    found = {}
    for action in parser._actions:
        name = action.option_strings[0] if action.option_strings else ""
        is_file_of_group = type(action).__name__ == "_ActionConfigLoad"  # which jsonargparse does not export
        is_hidden = is_file_of_group or action.help == argparse.SUPPRESS
        if name.startswith("-") and not name.endswith(".help") and not is_hidden:
            found[without_init_args(action.option_strings[-1].strip("-+"))] = action
    return found


def overview(parser: ArgumentParser) -> str:
    """Returns the help of a command: all options with their defaults, and one sentence about each."""
    groups = dict.fromkeys(name.partition(".")[0] for name in options(parser) if "." in name)
    lines = [
        f"usage: {_program(parser)} [-c FILE ...] [--OPTION VALUE ...]",
        "",
        *_wrapped(parser.description or ""),
        "",
    ]
    lines += ["options, with their defaults:"]
    for group in ("", *groups):
        if group:
            lines += ["", *_wrapped(f"{group}: {_title(parser, group)}")]
        for name, action in options(parser).items():
            if name.rpartition(".")[0].partition(".")[0] == group:
                required = " (required)" if action.required else ""
                lines += _row(_invocation(action), f"{first_sentence(action)}{required}")
    examples = [("data", "all about the options of a group"), ("data.partition", "its classes")]
    if "model.network" in options(parser):
        examples = [("trainer", "all about the options of a group"), ("model.network", "its classes")]
    option = examples[1][0]
    examples += [(f"{option}={next(iter(classes(option)))}", "the arguments of a class")]
    lines += ["", "To read more about an option, a group or a class:"]
    lines += [line for path, text in examples for line in _row(f"{_program(parser)} --help {path}", text, 48)]
    return "\n".join(lines) + "\n"


def described(parser: ArgumentParser, path: str) -> str:
    """Returns everything about one option, group, or class of an option.

    Args:
        parser: the parser of a command.
        path: the name of an option or a group, or ``OPTION=CLASS``.

    Raises:
        ValueError: if there is no such option or class.
    """
    if len(words := path.split()) > 1:
        raise ValueError(f"got {len(words)} names; --help is about one. Give one option, group or class.")
    name, _, kind = without_init_args(path.lstrip("-")).partition("=")
    known = options(parser)
    nested = [without_init_args(option) for option in CLASSES if without_init_args(option) not in known]
    if kind:
        if name not in [without_init_args(option) for option in CLASSES]:
            raise ValueError(f"{name} is not an option that takes a class.")
        return _of_class(parser, name, kind)
    if name in known or (name in nested and name.partition(".")[0] in {each.partition(".")[0] for each in known}):
        lines = entry(known[name]) if name in known else [f"  --{name}"]
        return "\n".join([*lines, *_offered(parser, name)]) + "\n"
    inside = [action for option, action in known.items() if option.startswith(f"{name}.")]
    if not inside:
        group = name.partition(".")[0]
        siblings = [option for option in known if option.startswith(f"{group}.")]
        exist = siblings or list(dict.fromkeys(option.partition(".")[0] for option in known))
        raise ValueError(
            f"there is no such option.{closest(name, [*known, *exist], cutoff=0.75)} There are {', '.join(exist)}."
        )
    title = _wrapped(f"{name}: {_title(parser, name)}")
    return "\n".join([*title, *(line for action in inside for line in ["", *entry(action)])]) + "\n"


def entry(action: argparse.Action) -> list[str]:
    """Returns the lines about an option: its default, its whole description, and its type in words."""
    about, hint = _about(action), getattr(action, "_typehint", action.type)
    if about and not (action.help or "").startswith("`"):  # a value keeps its small letter
        about = about[0].upper() + about[1:]
    if about and not about.endswith("."):
        about += "."
    kind = f"Type: {_type(hint)}." if hint is not None else ""
    required = "Required. " if action.required else ""
    return [f"  {_invocation(action)}", *_wrapped(about, 6), *_wrapped(required + kind, 6)]


def first_sentence(action: argparse.Action) -> str:
    """Returns the first sentence about an option, up to a semicolon, without markup and full stop."""
    return re.split(r"(?<!e\.g)\.(?:\s|$)|;\s", _about(action), maxsplit=1)[0]


def _of_class(parser: ArgumentParser, option: str, name: str) -> str:
    kind = _class(option, name)
    arguments = type(parser)()
    if isinstance(kind, type):
        skip: set[str | int] = {"params"} if option == "model.optimizer" else set()  # which lcfl gives
        arguments.add_class_arguments(kind, option, fail_untyped=False, skip=skip)
    else:
        arguments.add_function_arguments(kind, option, fail_untyped=False)
    paragraphs = SECTION.split(inspect.getdoc(kind) or "", maxsplit=1)[0].strip().split("\n\n")
    lines = [line for text in paragraphs for line in [*_wrapped(_plain(text)), ""]]
    lines = [*_wrapped(f"{kind.__module__}.{kind.__qualname__}"), *lines]
    own = [action for name, action in options(arguments).items() if name.startswith(f"{option}.")]
    lines += [f"arguments, to be given after --{option}={name}:" if own else "It has no arguments."]
    return "\n".join([*lines, *(line for action in own for line in entry(action))]) + "\n"


def _class(option: str, name: str) -> Any:
    """Returns the class or function that an option names."""
    paths = [each for each in CLASSES if without_init_args(each) == option]
    known = {name: kind for each in paths for name, kind in classes(each).items()}
    if name in known:
        return known[name]
    module, _, last = name.rpartition(".")
    try:
        return getattr(import_module(module or OTHERS[option].rpartition(".")[0]), last)
    except (ImportError, AttributeError, KeyError):
        found = f" Classes of lcfl: {', '.join(known)}; any" if known else " Any"
        guess = closest(name, list(known))
        raise ValueError(
            f"there is no class {name!r}.{guess}{found} other class needs its import path, package.module.Class."
        ) from None


def _offered(parser: ArgumentParser, option: str) -> list[str]:
    """Returns the lines about the classes for an option; none for an option that takes no class."""
    path = next((each for each in CLASSES if without_init_args(each) == option), None)
    if path is None:
        return []
    known = classes(path) if path not in OTHERS else {}
    lines = [""]
    if known:
        column = max(map(len, known)) + 4
        lines += ["classes of lcfl:"]
        for name, kind in known.items():
            lines += _row(name, _summary(kind), column)
        lines += [""]
    such = f", such as {OTHERS[option]}" if option in OTHERS else ", package.module.Class"
    example = OTHERS[option] if option in OTHERS else next(iter(known))
    lines += _wrapped(f"Any {'other ' if known else ''}class needs its import path{such}. The arguments of a class:")
    return [*lines, f"  {_program(parser)} --help {option}={example}"]


def _type(hint: Any) -> str:
    """Returns a type in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        words = dict.fromkeys(map(_type, arguments))
        narrower = {"a whole number": "a number", "text": "a path"}
        kept = [word for word in words if narrower.get(word) not in words]
        return " or ".join(sorted(kept, key=lambda word: (";" in word, word == "null")))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is collections.abc.Callable:
        return _type(arguments[-1])
    if origin in LISTS:
        return f"a list; each item is {_type(arguments[0])}" if arguments else "a list"
    if origin in (dict, collections.abc.Mapping):
        return f"a mapping; each value is {_type(arguments[1])}"
    name = getattr(hint, "__name__", str(hint))
    if name in WORDS or name == "Path":
        return WORDS.get(name, "a path")
    if isinstance(hint, type) and issubclass(hint, int):
        return (hint.__doc__ or "a whole number").replace("An integer", "a whole number")
    is_protocol = getattr(hint, "_is_protocol", False)
    return "a class or a function" if is_protocol else f"a subclass of {name}" if isinstance(hint, type) else name


def _invocation(action: argparse.Action) -> str:
    """Returns the flags of an option, followed by its default, or by a word for what must be given."""
    flags = ", ".join(flag for flag in action.option_strings if not flag.endswith("+"))
    if isinstance(action, ActionConfigFile):
        return f"{flags} FILE"
    if isinstance(action, Help):
        return f"{flags} [PATH]"
    if action.default == argparse.SUPPRESS:
        return flags
    if action.required:
        return f"{flags} {'CLASS' if without_init_args(action.dest) in map(without_init_args, CLASSES) else 'VALUE'}"
    return f"{flags} {_value(action.default)}"


def _value(value: Any) -> str:
    """Returns a default as it is written in YAML; of a class only its path."""
    if isinstance(value, dict) and "class_path" in value:
        return str(value["class_path"])
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return YAML.get(str(value), str(value))


def _title(parser: ArgumentParser, group: str) -> str:
    """Returns the sentence about a group, which is that of its class."""
    for each in parser._action_groups:
        if any(action.dest.startswith(f"{group}.") for action in each._group_actions):
            return _plain(each.title or "")
    return ""


def _program(parser: ArgumentParser) -> str:
    return parser.prog.replace(" [options]", "")


def _plain(text: str) -> str:
    """Returns a text without the marks of code and with single spaces."""
    return " ".join(re.sub(r"`+", "", text).replace("%%", "%").split())


def _about(action: argparse.Action) -> str:
    """Returns the description of an option, with values as in YAML."""
    return re.sub(r"\b(None|True|False)\b", lambda match: YAML[match[1]], _plain(action.help or ""))


def _summary(kind: type) -> str:
    """Returns the first line of a docstring, without its full stop."""
    return _plain((inspect.getdoc(kind) or "").partition("\n")[0]).removesuffix(".")


def _width() -> int:
    return max(60, min(100, shutil.get_terminal_size().columns))


def _wrapped(text: str, indent: int = 0) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(text, _width(), initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)


def _row(left: str, right: str, column: int = COLUMN) -> list[str]:
    """Returns the lines of a row with two columns."""
    lines = _wrapped(right, column)
    if len(left) > column - 4 or not lines:
        return [f"  {left}", *lines]
    return [f"  {left}".ljust(column) + lines[0].strip(), *lines[1:]]
