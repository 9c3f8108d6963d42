"""Links that read the same on a code host: to files outside of docs/, and from the names of things to the reference."""

import os
import re
from typing import Any

import pages
from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]+)?\)")


def adjust(app: Any, name: str, source: list[str]) -> None:
    """Turns links to files outside of docs/ into links to their page, into downloads, or, of folders, into text."""
    if name.startswith("api/"):
        return
    shown = pages.DOCS / f"{name}.md"
    origin = next((pages.ROOT / page for page, made in pages.PROJECT.items() if made == f"{name}.md"), shown)

    def moved(link: re.Match[str]) -> str:
        mark, text, target, anchor = link[1], link[2], link[3], link[4] or ""  # ! in front of a picture
        path = (origin.parent / target).resolve()
        if ":" in target or not path.is_relative_to(pages.ROOT) or not path.exists():
            return link[0]
        if path.is_dir():
            return text
        inside = str(path.relative_to(pages.ROOT))
        if inside in pages.PROJECT:
            path = pages.DOCS / pages.PROJECT[inside]
        return f"{mark}[{text}]({os.path.relpath(path, shown.parent)}{anchor})"

    text = source[0].replace("<!-- generated: methods -->", pages.methods_table())
    source[0] = LINK.sub(moved, text) + pages.navigation(name)


def escape_bars(app: Any, what: str, name: str, made: Any, options: Any, lines: list[str]) -> None:
    """A norm such as |w - Omega| in a docstring is no substitution of reStructuredText."""
    for number, line in enumerate(lines):
        parts = re.split(r"(``.*?``|`[^`]*`)", line)
        lines[number] = "".join(part if part.startswith("`") else part.replace("|", r"\|") for part in parts)


class LinkedNames(SphinxPostTransform):
    """Makes a link of every `name` that stands for one thing of the reference: its full path, or a class's name."""

    default_priority = 200

    def run(self, **kwargs: Any) -> None:
        """Goes through one page."""
        known = self.env.get_domain("py").objects
        classes: dict[str, list[str]] = {}
        for path, entry in known.items():
            if entry.objtype in ("class", "exception") and not entry.aliased:
                classes.setdefault(path.rpartition(".")[2], []).append(path)
        for node in list(self.document.findall(nodes.literal)):
            if isinstance(node.parent, nodes.reference | nodes.title):
                continue
            text = node.astext()
            matches = [text] if text.startswith("lcfl") else classes.get(text, [])
            if len(matches) != 1 or matches[0] not in known:
                continue
            entry = known[matches[0]]
            link = make_refnode(self.app.builder, self.env.docname, entry.docname, entry.node_id, node.deepcopy(), text)
            node.replace_self(link)


def inline_math(writer: Any, node: nodes.Node) -> None:
    """A formula in a line as MathML, which browsers draw without any script."""
    writer.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def block_math(writer: Any, node: nodes.Node) -> None:
    """A formula of its own."""
    writer.body.append(f'<div class="math">{_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def _mathml(node: nodes.Node, as_block: bool) -> str:
    try:
        return str(tex2mathml(node.astext(), as_block))
    except MathError as error:
        logging.getLogger(__name__).warning("%s: %s", node.astext(), error, location=node)
        return node.astext()
