"""Configuration files in layers: a layer that names a class starts from that class's own defaults."""

import os
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, Namespace  # type: ignore[attr-defined]

__all__ = ["LayeredConfig", "forget"]


def forget(below: Namespace, layer: dict[str, Any]) -> None:
    """Drops from the configuration `below` what `layer` names anew.

    jsonargparse keeps every same-named argument of a class that a later file replaces, and merges
    lists of equal length item by item: a data set's ``num_classes`` would survive in the next one's
    network. So of a class that the layer names, the arguments below go; of a list that it gives, the
    items. A layer that gives ``init_args`` without a class adjusts the class that is there.
    """
    for key, new in layer.items():
        old = below.get(key)
        if isinstance(old, list) and isinstance(new, list):
            below[key] = []
        elif isinstance(old, Namespace) and "class_path" in old:
            if isinstance(new, str) or (isinstance(new, dict) and "class_path" in new):
                below[key] = Namespace(class_path=old["class_path"])  # type: ignore[no-untyped-call]
            elif isinstance(new, dict) and "init_args" in old:
                forget(old["init_args"], new.get("init_args", new))
        elif isinstance(old, Namespace) and isinstance(new, dict):
            forget(old, new)


class LayeredConfig(ActionConfigFile):
    """The action of ``-c``: makes room for the layer, then reads it as jsonargparse does."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Applies one file, or one YAML text."""
        try:
            # os.path: a text may be too long for a name, where Path.is_file raises
            layer = yaml.safe_load(Path(values).read_text() if os.path.isfile(values) else values)
        except (yaml.YAMLError, OSError, ValueError, TypeError):
            layer = None  # unreadable: jsonargparse says so itself
        if isinstance(layer, dict):
            forget(cfg, layer)
        super().__call__(parser, cfg, values, option_string)  # type: ignore[no-untyped-call]
