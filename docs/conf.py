"""How Sphinx makes the site: `make docs`. The pages are the Markdown of this repository.

The source folder is the repository itself, so that every page stands where its readers
find it in the tree, and a link is right in both places. Nothing is fetched: no other
site's inventory, and the theme brings its fonts, styles and scripts along.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tomllib
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parent.parent
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "docs" / "_site")]

import docstrings  # noqa: E402
import links  # noqa: E402
import overwire  # noqa: E402
import pages  # noqa: E402

project = "overwire"
author = "The authors of overwire"
version = release = overwire.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**.md"]
# What is left out is not walked either: it holds whole environments.
exclude_patterns = [p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "docs"]

# A missing target is a warning, and warnings end the build.
nitpicky = True
nitpick_ignore_regex = docstrings.FOREIGN

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
suppress_warnings = ["myst.header"]  # pages may begin their sections at any level

autodoc_mock_imports = ["torch"]  # which the pages do not need, and checkpoints imports
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True}
python_maximum_signature_line_length = 100
python_display_short_literal_types = True
add_module_names = False
toc_object_entries = False
default_role = "code"

smartquotes = False  # "cpu" in a docstring is what a program has to say

html_theme = "furo"
html_title = f"overwire {release}"
html_short_title = "overwire"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs/_site/static/scorer.js")
html_logo = html_favicon = "_site/static/logo.svg"
html_theme_options = {
    "source_view_link": URLS["Repository"] + "/blob/main/{filename}",
    "source_edit_link": URLS["Repository"] + "/edit/main/{filename}",
    "footer_icons": [{"name": "Repository", "url": URLS["Repository"], "html": "Repository", "class": ""}],
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # examples are copied as programs, without what they print
copybutton_prompt_is_regexp = True
templates_path = ["_site"]
html_additional_pages = {"index": "start.html"}
pygments_style = "default"


def setup(app: Sphinx) -> None:
    """Register how docstrings become text, and their types links."""
    app.connect("autodoc-process-docstring", docstrings.convert)
    app.connect("doctree-read", links.drop_builtins)
    app.connect("missing-reference", links.resolve)
    app.connect("html-page-context", pages.describe)
    analyze = ModuleAnalyzer.analyze

    def analyze_once(self: ModuleAnalyzer) -> None:
        done = self._analyzed
        analyze(self)
        if not done:  # a function has one signature on its page
            self.overloads = {name: [docstrings.join_overloads(each)] for name, each in self.overloads.items()}

    ModuleAnalyzer.analyze = analyze_once
