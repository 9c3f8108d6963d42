"""The pages that are not written by hand: the API reference, and those of the repository outside of docs/.

All of it lies in `docs/api/` and `docs/project/`, which are not tracked.
"""

import inspect
import json
import pkgutil
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

import lcfl

DOCS = Path(__file__).parent
ROOT = DOCS.parent

# Pages of the repository that are pages of the documentation, too.
PROJECT = {
    "README.md": "project/readme.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "logs/README.md": "project/runs.md",
    "configs/README.md": "project/configurations.md",
}

# What stands below a page in the navigation; a part of it by pattern, so that new pages come in by themselves.
NAVIGATION = {
    "index": {
        "Begin": ["Quickstart <project/readme>", "getting_started", "Overview <self>", "configuration"],
        "Experiments": [
            "data",
            "partitions",
            "client_transforms",
            "Test protocols <protocols>",
            "networks",
            "methods",
            "uploads",
            "Configurations <project/configurations>",
        ],
        "Runs": [
            "commands",
            "monitoring",
            "The run directory <project/runs>",
            "checkpoints",
            "comparing",
            "troubleshooting",
        ],
        "Bring your own": [
            "howto/data",
            "howto/clients",
            "howto/tasks",
            "howto/known_sets",
            "howto/huggingface",
            "howto/network",
            "howto/pretrained",
            "howto/method",
            "howto/compositions",
            "howto/callback",
            "howto/machines",
            "howto/fleet",
            "howto/robust",
        ],
        "Background": [
            "architecture",
            "glossary",
            "api/index",
            "results",
            "papers",
            "performance",
            "optimisations",
            "project/contributing",
            "project/security",
            "project/changelog",
        ],
    },
    "partitions": {"": ["partitions/*"]},
    "protocols": {
        "": [f"protocols/{name}" for name in ("own_split", "label_view", "label_proportional", "global", "*")],
    },
    "methods": {"": ["methods/*"]},
}

# The modules of the reference, by what one looks for. Those that are not named here come last.
GROUPS = {
    "What a script begins with": ["lcfl"],
    "The four parts of a method": [
        "lcfl.methods.local",
        "lcfl.methods.exchange",
        "lcfl.methods.exchange.transforms",
        "lcfl.methods.aggregation",
        "lcfl.methods.clustering",
    ],
    "Data": [
        *("lcfl.data.datamodule", "lcfl.data.datasets", "lcfl.data.partition", "lcfl.data.protocols"),
        *("lcfl.data.transforms", "lcfl.data.augmentation", "lcfl.data.views", "lcfl.data.samples"),
        *("lcfl.data.conversion", "lcfl.data.population", "lcfl.data.train_test_split"),
    ],
    "Networks and formulas": ["lcfl.models", "lcfl.methods.clustering.similarity"],
    "Watching a run, and what it leaves": ["lcfl.callbacks", "lcfl.figures", "lcfl.server.metrics", "lcfl.runs.result"],
    "What callbacks and parts are given": [
        "lcfl.core.callback",
        "lcfl.server.server",
        "lcfl.core.clients",
        "lcfl.core.messages",
    ],
}
REST = "Inside"


def modules() -> list[str]:
    """Every module of the package."""
    found = pkgutil.walk_packages(lcfl.__path__, "lcfl.")
    return ["lcfl", *sorted(each.name for each in found if not each.name.endswith("__main__"))]


def public(module: ModuleType) -> list[str]:
    """What a module offers and no package above it does."""
    names = [name for name in getattr(module, "__all__", []) if not name.startswith("__")]
    above = module.__name__
    while "." in above:
        above = above.rpartition(".")[0]
        package = import_module(above)
        offered = getattr(package, "__all__", [])
        names = [name for name in names if name not in offered or getattr(package, name) is not getattr(module, name)]
    return names


def grouped() -> dict[str, dict[str, list[str]]]:
    """Group -> page -> its modules: each module is on the page of the longest name that it begins with."""
    groups = {group: {name: [] for name in names} for group, names in GROUPS.items()} | {REST: {}}
    places = {name: pages for pages in groups.values() for name in pages}
    for module in modules():
        found = [name for name in places if name != "lcfl" and f"{module}.".startswith(f"{name}.")]
        page = max(found, key=len, default=module if module == "lcfl" else ".".join(module.split(".")[:2]))
        places.setdefault(page, groups[REST]).setdefault(page, []).append(module)
    return {
        group: {page: found for page, found in pages.items() if any(public(import_module(each)) for each in found)}
        for group, pages in groups.items()
    }


def documented() -> dict[str, str]:
    """Every name of the reference and its page."""
    return {
        f"{module}.{name}": page
        for pages in grouped().values()
        for page, members in pages.items()
        for module in members
        for name in public(import_module(module))
    }


def reference() -> dict[str, str]:
    """The pages of the API reference, by path below docs/."""
    index = ["# API reference", "", "Everything public, from the docstrings of the code.", ""]
    written = {}
    for group, found in grouped().items():
        index += [f"## {group}", "", "| | |", "|---|---|"]
        index += [f"| [`{page}`]({page}.md) | {_summary(page)} |" for page in found]
        index += ["", "```{toctree}", ":hidden:", "", *found, "```", ""]
        written |= {f"api/{page}.md": _page(page, members) for page, members in found.items()}
    return {"api/index.md": "\n".join(index), **written}


def write() -> None:
    """Writes what has changed, and removes what should not be there any more."""
    wanted = reference() | {page: (ROOT / source).read_text() for source, page in PROJECT.items()}
    for folder in ("api", "project"):
        (DOCS / folder).mkdir(exist_ok=True)
        for path in (DOCS / folder).glob("*.md"):
            if str(path.relative_to(DOCS)) not in wanted:
                path.unlink()
    for name, text in wanted.items():
        path = DOCS / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def navigation(page: str) -> str:
    """The part of the table of contents that lies below a page, as directives that only Sphinx sees."""
    lines = []
    for caption, names in NAVIGATION.get(page, {}).items():
        lines += ["", "```{toctree}", ":hidden:", ":glob:", *([f":caption: {caption}"] if caption else []), ""]
        lines += [*names, "```", ""]
    return "\n".join(lines)


def method_page(path: Path) -> str:
    """The page of a file in configs/methods/, to which its row in methods.md links."""
    (row,) = [row for row in (DOCS / "methods.md").read_text().splitlines() if f"`methods/{path.name}`" in row]
    return re.findall(r"\]\((methods/\w+\.md)", row)[0]


def methods_table() -> str:
    """The four parts of every method in configs/methods/, from the files."""
    lines = [
        "## Their four parts",
        "",
        "With the arguments that differ from the defaults.",
        "",
        "| method | local update | exchange | aggregation | clustering |",
    ]
    lines += ["|---" * 5 + "|"]
    for path in sorted((ROOT / "configs/methods").glob("*.yaml")):
        parts = yaml.safe_load(path.read_text())["method"]
        name = f"[{path.stem}]({method_page(path)})"
        listed = [[parts[part]] for part in ("local_update", "exchange", "aggregation")] + [parts["clustering"]]
        cells = ["<br>".join(map(_shown, each)) or "none" for each in listed]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def check(app: Any, env: Any) -> None:
    """Warns, and so ends a strict build, if something public is not in the reference."""
    from sphinx.util import logging

    known = env.get_domain("py").objects
    for name, page in documented().items():
        if name not in known:
            logging.getLogger(__name__).warning("%s is missing from the reference", name, location=f"api/{page}")


def _shown(part: dict[str, Any]) -> str:
    """A class with those of its arguments that differ from its defaults."""
    module, _, name = part["class_path"].rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters
    given = {key: value for key, value in part.get("init_args", {}).items() if value != parameters[key].default}
    return " ".join([f"`{name}`", ", ".join(f"{key}: {_value(value)}" for key, value in given.items())]).strip()


def _value(value: Any) -> str:
    is_part = isinstance(value, dict) and "class_path" in value
    return _shown(value) if is_part else json.dumps(value).strip('"')


def _summary(module: str) -> str:
    """The first sentence of its docstring."""
    first = (inspect.getdoc(import_module(module)) or "").partition("\n\n")[0].replace("\n", " ")
    return first.partition(": ")[0].rstrip(".") if len(first) > 100 else first.rstrip(".")


def _page(page: str, members: list[str]) -> str:
    lines = [f"# {page}", ""]
    for module in members:
        loaded = import_module(module)
        names = public(loaded)
        if module != page:
            if not names:
                continue
            lines += [f"## {module}", ""]
        lines += ["```{eval-rst}", f".. automodule:: {module}", "   :no-members:", ""]
        lines += [line for name in names for line in _directive(module, name, getattr(loaded, name))]
        lines += ["```", ""]
    return "\n".join(lines)


def _directive(module: str, name: str, made: Any) -> list[str]:
    if inspect.isclass(made) or inspect.isroutine(made):
        kind = "class" if inspect.isclass(made) else "function"
        more = ["   :special-members: __call__"] if kind == "class" and "__call__" in vars(made) else []
        return [f".. auto{kind}:: {module}.{name}", *more, ""]
    # A constant has no docstring: the comment above it, if there is one.
    source = inspect.getsource(import_module(module))
    comment = re.search(rf"((?:^#.*\n)+){name}\b", source, re.MULTILINE)
    text = " ".join(line.lstrip("# ") for line in comment[1].splitlines()) if comment else ""
    return [f".. py:data:: {name}", f"   :module: {module}", "", f"   {text}", ""]
