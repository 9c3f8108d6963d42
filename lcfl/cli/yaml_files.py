"""Configuration files are YAML: their names, how they are read, and what is wrong in one that is not YAML."""

from pathlib import Path

import yaml

__all__ = ["LOADER", "SUFFIXES", "yaml_error"]

SUFFIXES = (".yaml", ".yml", ".json")  # JSON is YAML, too
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, as in jsonargparse: eight times as fast


def yaml_error(path: Path) -> str:
    """Returns what is wrong in a file that is not YAML, else nothing. jsonargparse would not name the file."""
    try:
        yaml.safe_load(path.read_text("utf-8"))  # its messages quote the text, unlike those of libyaml
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        return " ".join(str(error).split())
    return ""
