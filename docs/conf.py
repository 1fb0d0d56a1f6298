"""The site: `make docs`. The source directory is the repository, so that links work in a clone as they do here."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fastmax

project = "fastmax"
version = release = fastmax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "docs/*.rst", "*/README.md"]
exclude_patterns = [".*", "build", "out", "dist", "*.egg-info"]

html_theme = "furo"
html_title = "fastmax"
html_extra_path = ["site"]  # index.html, which leads to docs/index.html
html_show_copyright = False

nitpicky = True
nitpick_ignore_regex = [  # in signatures: other libraries' classes, a type variable, and what no caller constructs
    ("py:class", r"(Tensor|collections|np|torch|transformers)\b.*"),
    ("py:class", r"fastmax\.(softmax\.Array|core\.score\.Score|nn\.key_value_cache\.Memory)"),
]
myst_heading_anchors = 3
default_role = "code"  # docstrings write `this` for code, as Markdown does
autodoc_member_order = "bysource"
napoleon_use_rtype = False


def indented_is_code(app, what, name, obj, options, lines):
    """Docstrings set code as Markdown does, by four more spaces after an empty line; reST wants `::` before it."""
    for i in range(len(lines) - 1, 1, -1):
        before = lines[i - 2]
        indent = len(lines[i]) - len(lines[i].lstrip())
        starts = lines[i].strip() and not lines[i - 1].strip() and before.strip()
        if starts and indent >= 4 + len(before) - len(before.lstrip()) and not re.match(r"\s*([-*]|\.\.) ", before):
            lines[i - 1 : i] = ["", "::", ""]


def setup(app):
    app.connect("autodoc-process-docstring", indented_is_code, priority=100)
