"""Sphinx makes HTML of the markdown in docs/ and of the docstrings of lcfl; `make docs` runs it."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import links
import pages

import lcfl

project = "lcfl"
author = "the authors of lcfl"
version = release = lcfl.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
default_role = "code"  # `Name` in a docstring; links.py makes a link of it where there is such a thing

myst_enable_extensions = ["dollarmath", "attrs_block"]
myst_heading_anchors = 4  # the anchors that code hosts give to headings
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_use_ivar = True
napoleon_custom_sections = [("Class attributes", "params_style")]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"lcfl {version}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["lcfl.css"]
html_copy_source = html_show_sourcelink = html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    pages.write()
    app.connect("source-read", links.adjust)
    app.connect("autodoc-process-docstring", links.escape_bars)
    app.connect("env-check-consistency", pages.check)
    app.add_post_transform(links.LinkedNames)
    app.add_html_math_renderer("mathml", (links.inline_math, None), (links.block_math, None))
