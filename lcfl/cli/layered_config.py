"""Configuration files as layers. A layer that names a class starts from the defaults of that class."""

import argparse
import contextlib
import os
import re
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, Namespace  # type: ignore[attr-defined]

from lcfl.cli.class_options import with_modules
from lcfl.cli.option_paths import without_init_args
from lcfl.cli.shipped_configs import names
from lcfl.cli.type_errors import WORDS
from lcfl.cli.yaml_files import LOADER, SUFFIXES, yaml_error
from lcfl.core.earlier_versions import is_of_0_1, with_current_paths

__all__ = ["LayeredConfig", "as_layers", "forget", "names_class", "whole_lists"]

OPTION = re.compile(r"--([\w.]+)(?:=(.*))?", re.DOTALL)  # --option=value or --option value
CLASS = re.compile(r"[A-Za-z_][\w.]*")
ADDED = re.compile(r"--([\w.]+)\+(?:=|$)")  # --list+=value
ITEM = re.compile(r"([\w.]+)\.(\d+)\.([\w.]+)")  # list.0.argument
# Options that take several classes. After --list+=Class, an argument without a number belongs to that class.
LISTS = (
    "trainer.callbacks",
    "trainer.logger",
    "method.clustering",
    "method.exchange.transforms",
    "data.client_transforms",
    "data.faults",
)


def forget(below: Namespace | dict[str, Any], layer: dict[str, Any]) -> None:
    """Drops from the configuration `below` what `layer` replaces.

    jsonargparse does not drop it. If a later file names another class, jsonargparse keeps every argument of the old
    class that the new one has, too, and it merges lists of equal length item by item. The ``num_classes`` of one data
    set, for example, would survive in the network of the next. Therefore the arguments below are dropped if the layer
    names a class, and the items below are dropped if the layer gives a list. A layer that gives ``init_args`` without a
    class changes the class that is there.
    """
    for key, new in layer.items():
        old = below.get(key)
        if isinstance(old, list) and isinstance(new, list):
            below[key] = []
        elif isinstance(old, Namespace) and "class_path" in old:
            if isinstance(new, str) or (isinstance(new, dict) and "class_path" in new):
                below[key] = Namespace(class_path=old["class_path"])  # type: ignore[no-untyped-call]
            elif isinstance(new, dict) and "init_args" in old:
                arguments = new.get("init_args", new)
                if isinstance(arguments, dict):  # the parser refuses anything else
                    forget(old["init_args"], arguments)
        elif isinstance(old, Namespace | dict) and isinstance(new, dict):
            forget(old, new)


def as_layers(words: Sequence[str], classes: Sequence[str] = ()) -> list[str]:
    """Converts arguments that change a class into layers, so that they have the same effect as in a file.

    These are an argument of one item of a list, as in ``--method.clustering.0.theta=1``, or of its only item, as in
    ``--method.clustering.theta=1``, and the name of a class for one of the options `classes`, as in
    ``--model.optimizer=Adam``. All other words are returned unchanged.

    Args:
        words: the words of the command line.
        classes: the options that take a class.
    """
    converted, rest = [], iter(words)
    named = {without_init_args(option) for option in classes}
    opened: set[str] = set()  # lists whose last item the words have named
    for word in rest:
        match = OPTION.fullmatch(word)
        if match and (keys := _keys_of_item(match[1], opened)):
            text = next(rest, "") if match[2] is None else match[2]
            try:
                layer: Any = yaml.load(text, LOADER)
            except yaml.YAMLError:
                raise ValueError(f"--{match[1]}: got {text}, which is not valid YAML.") from None
            converted += ["-c", _nested(keys, layer)]
        elif match and without_init_args(match[1]) in named:
            following = [] if match[2] is not None else [*islice(rest, 1)]
            text = match[2] if match[2] is not None else "".join(following)
            value = _value(text)
            (opened.add if _is_class(value) else opened.discard)(without_init_args(match[1]))
            if _names_classes(value):
                converted += ["-c", _nested(match[1].split("."), value)]
            else:
                converted += [word, *following]
        else:
            if added := ADDED.match(word):
                opened.add(without_init_args(added[1]))
            converted.append(word)
    return converted


def _nested(keys: Sequence[str | int], value: Any) -> str:
    """Returns a value below these keys as YAML."""
    for key in reversed(keys):
        value = {key: value}
    return yaml.safe_dump(value)


def _keys_of_item(option: str, opened: set[str]) -> list[str | int]:
    """Returns the keys of an option that is an argument of an item of a list; none for any other option."""
    if match := ITEM.fullmatch(option):
        path, number, argument = match.groups()
        return [*path.split("."), int(number), *argument.split(".")]
    plain = without_init_args(option)
    path = f"{plain}." if option.endswith(".init_args") else plain
    in_list = any(path.startswith(f"{each}.") for each in LISTS if each not in opened)
    return [*option.split(".")] if in_list and not plain.endswith((".help", ".class_path")) else []


def names_class(words: Sequence[str], group: str) -> bool:
    """Returns whether the words of a command, or the ``-c`` layers among them, name a class for a whole group.

    Args:
        words: the words of the command line.
        group: the name of the group, such as ``model``.
    """
    options_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options_parser.add_argument("-c", "--config", nargs="?", action="append", default=[])
    options_parser.add_argument(f"--{group}", nargs="?", dest="given")
    options_parser.add_argument(f"--{group}.class_path", nargs="?", dest="class_path")
    options, _ = options_parser.parse_known_args(words)
    values = [_read(options.given)]
    for config in options.config:
        layer = _read(config)
        given = layer.get(group) if isinstance(layer, dict) else None
        folder = os.path.dirname(config) if layer is not None and os.path.isfile(config) else ""
        values.append(_read(os.path.join(folder, given)) if isinstance(given, str) and not _is_class(given) else given)
    return options.class_path is not None or any(map(_is_class, values))


def _value(text: str) -> Any:
    """Returns the value that a word of the command line stands for; None if it is not valid YAML."""
    try:
        return yaml.load(text, LOADER)
    except yaml.YAMLError:
        return None


def _names_classes(value: Any) -> bool:
    """Returns whether a value is a class, by name or with its arguments, or a list or a mapping of classes."""
    items = [*value.values()] if isinstance(value, dict) and not _is_class(value) else value
    return all(map(_is_class, items if isinstance(items, list) and items else [value]))


def whole_lists(below: Namespace, layer: dict[Any, Any], option: str = "") -> dict[Any, Any]:
    """Returns the layer with complete lists.

    A layer may change the items of a list by their numbers, as in ``{0: {theta: 1}}``, its only item without its
    number, as in ``{theta: 1}``, or give one class for a list of classes.

    Args:
        below: the configuration below the layer.
        layer: the layer.
        option: the option that the layer is for; empty for the whole configuration.

    Raises:
        ValueError: if the layer changes an item that the list does not have, or does not say which of several.
    """
    whole = dict(layer)
    for key, new in layer.items():
        old, name = below.get(str(key)), f"{option}.{key}".lstrip(".")
        if _is_class(new):
            holds_classes = isinstance(old, list) and all(isinstance(item, Namespace) for item in old)
            whole[key] = [new] if holds_classes or without_init_args(name) in LISTS else new
            continue
        if not isinstance(new, dict):
            continue
        if isinstance(old, list) or (without_init_args(name) in LISTS and not isinstance(old, Namespace)):
            present = old if isinstance(old, list) else []
            items = [item.as_dict() if isinstance(item, Namespace) else item for item in present]
            if new and not any(isinstance(each, int) for each in new):  # the arguments of the only item
                _check_single(name, items, next(iter(new.get("init_args") or new)))
                new = {0: new}
            for number, arguments in new.items():
                if number not in range(len(items)):
                    raise ValueError(
                        f"{name}: there is no item {number!r}; the list has {len(items)} items, counted from 0."
                    )
                items[number] = _changed(items[number], arguments)
            whole[key] = items
        elif isinstance(old, Namespace):
            is_class = "init_args" in old and "init_args" not in new
            whole[key] = whole_lists(old["init_args"] if is_class else old, new, name)
    return whole


def _is_class(value: Any) -> bool:
    """Returns whether a value is a class, with its arguments or by name, and not a configuration file."""
    if isinstance(value, str):
        return bool(CLASS.fullmatch(value)) and not value.endswith(SUFFIXES)
    return isinstance(value, dict) and "class_path" in value


def _changed(item: Any, arguments: Any) -> Any:
    if not isinstance(item, dict) or not isinstance(arguments, dict) or "class_path" in arguments:
        return arguments
    if "class_path" not in item:
        return item | arguments
    below, given = item.get("init_args", {}), arguments.get("init_args", arguments)
    changed = {key: _changed(below[key], new) if _is_class(below.get(key)) else new for key, new in given.items()}
    return item | {"init_args": below | changed}


def _check_single(option: str, items: list[Any], argument: str) -> None:
    """Refuses an argument for an item of a list without its number, unless the list has one item."""
    if not items:
        raise ValueError(
            f"{option}: got {argument} for no class. Name it first: --{option}=CLASS --{option}.{argument}=VALUE"
        )
    if len(items) > 1:
        kinds = [str(item.get("class_path")).rpartition(".")[2] if isinstance(item, dict) else item for item in items]
        allowed = [f"{option}.{number}.{argument} ({kind})" for number, kind in enumerate(kinds)]
        raise ValueError(
            f"{option}.{argument}: the list has {len(items)} items, and this names none of them; write "
            f"{' or '.join(allowed)}."
        )


def _without_class(new: Any) -> Any:
    """Returns the arguments that a layer gives for a group.

    The class of a group is left out, because naming it keeps what the layers below give, for example a network.
    """
    if not _is_class(new):
        return new
    return new.get("init_args", {}) if isinstance(new, dict) else {}


def _read(layer: Any) -> Any:
    """Returns the content of a file or a YAML text, or None if it cannot be read, which jsonargparse reports itself."""
    try:
        is_file = os.path.isfile(layer)  # unlike Path.is_file, it accepts a text that is too long for a name
        return yaml.load(Path(layer).read_text("utf-8") if is_file else layer, LOADER)
    except (yaml.YAMLError, AttributeError, OSError, ValueError, TypeError):
        return None


def _unusable(layer: Any) -> str:
    """Returns why the content of a file is no configuration, else nothing."""
    if isinstance(layer, dict) and "described" in layer:
        return "describes a run that was started from Python. Test or resume it from Python, with its model and method"
    if isinstance(layer, dict):
        return ""
    got = "is empty" if layer is None else f"holds {WORDS.get(type(layer).__name__, 'a value')}"
    return f"{got}; a configuration is a mapping, such as trainer: {{rounds: 5}}"


class LayeredConfig(ActionConfigFile):
    """The action of ``-c``. It drops what the layer replaces and then reads the layer as jsonargparse does.

    A layer may have a section ``methods`` that maps names of method files to layers. If a method file of that name
    comes later, the layer for it is applied right after the file. So the configuration of a paper gives every method of
    the paper's table the paper's settings.
    """

    _of_methods: dict[str, Any]

    def taken(self, layer: dict[str, Any]) -> dict[str, Any]:
        """Returns the part of a layer that concerns the command, which is the whole layer."""
        return layer

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Applies one file or one YAML text."""
        folder, layer, of_method = "", _read(values), None
        if layer is None and os.path.isfile(values) and (problem := yaml_error(Path(values))):
            parser.error(f"{values} is not valid YAML: {problem}.")
        if os.path.isfile(values) and (problem := _unusable(layer)):
            parser.error(f"{values} {problem}.")
        if not isinstance(cfg.get(self.dest), list):  # the first layer
            self._of_methods = {}
        if isinstance(layer, dict):
            is_file = os.path.isfile(values)
            folder = os.path.dirname(values) if is_file else ""
            if is_file and is_of_0_1(Path(values).read_text("utf-8")):
                layer = with_current_paths(layer)
                values = yaml.safe_dump(layer)
            if is_file and "method" in layer and "data" not in layer:
                of_method = self._settings_of(Path(values).stem)
            of_methods = layer.get("methods")
            given = layer
            if isinstance(of_methods, dict):
                self._of_methods = self._of_methods | of_methods
                given = {group: new for group, new in layer.items() if group != "methods"}
            whole = whole_lists(cfg, self.taken(with_modules(given)))
            if whole == layer:
                folder = ""  # the parser itself resolves paths relative to the file that names them
            else:
                layer, values = whole, yaml.safe_dump(whole)
            forget(cfg, {group: _without_class(new) for group, new in layer.items()})
        with contextlib.chdir(folder or "."):
            super().__call__(parser, cfg, values, option_string)  # type: ignore[no-untyped-call]
        arguments = cfg.get("model.init_args") or cfg.get("model") or {}
        parser.pulls |= {name: arguments[name] for name in parser.pulls if name in arguments}
        if of_method is not None:
            self(parser, cfg, yaml.safe_dump(of_method), option_string)

    def _settings_of(self, method: str) -> Any:
        """Returns the layer for a method file, and warns if there is none, but one for a name that may be misspelt.

        Names of a user's own method files are allowed, and names whose files are not part of this command.
        """
        if method not in self._of_methods:
            written = {str(name).lower(): str(name) for name in self._of_methods}
            alike = [written[name] for name in get_close_matches(method, written, cutoff=0.75)]
            if alike and (unknown := [name for name in alike if name not in names("methods")]):
                warnings.warn(
                    f"methods: {method}.yaml gets no settings, because they are for {unknown[0]!r}, which is no method "
                    f"of lcfl. If you mean this file, write {method}.",
                    stacklevel=2,
                )
        return self._of_methods.get(method)
