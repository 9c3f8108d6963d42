"""Configuration files are YAML: their names, how they are read, and what is wrong in one that is not YAML."""

from pathlib import Path
from typing import Any

import yaml

__all__ = ["LOADER", "SUFFIXES", "yaml_error"]


class _UniqueKeys:
    """Refuses a mapping with a key twice, of which YAML would take the last one."""

    def get_single_node(self) -> yaml.Node | None:
        """Returns the tree of a document, before values are made of it."""
        node: yaml.Node | None = super().get_single_node()  # type: ignore[misc]
        waiting, seen = [node], set[int]()
        while waiting:
            each = waiting.pop()
            if id(each) in seen or not isinstance(each, yaml.CollectionNode):
                continue
            seen.add(id(each))  # an anchor may be inside of what it names
            keys = set[str]()
            for key, value in each.value if isinstance(each, yaml.MappingNode) else enumerate(each.value):
                waiting.append(value)
                if isinstance(key, yaml.ScalarNode) and key.value in keys:
                    reason = f"the key {key.value} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, reason, key.start_mark)
                keys |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return node


def _loader(base: type) -> Any:
    return type("Loader", (_UniqueKeys, base), {})


SUFFIXES = (".yaml", ".yml", ".json")  # JSON is YAML, too
LOADER = _loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # libyaml, as in jsonargparse: eight times as fast


def yaml_error(path: Path) -> str:
    """Returns what is wrong in a file that is not YAML, else nothing. jsonargparse would not name the file."""
    quoting = _loader(yaml.SafeLoader)  # its messages quote the text, unlike those of libyaml
    try:
        yaml.load(path.read_text("utf-8"), quoting)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        return " ".join(str(error).split())
    return ""
