"""Adds a description to each page of the site, for search engines and previews: the page's first paragraph."""

from __future__ import annotations

import html
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LONGEST = 160  # letters that search engines show


def first_words(doctree: nodes.document) -> str:
    """Return the first paragraph of a page as text, cut after a word."""
    for paragraph in doctree.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        if len(text) > LONGEST:
            text = text[:LONGEST].rpartition(" ")[0].rstrip(",;:.") + " ..."
        return text
    return ""


def describe(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Sphinx's hook: add the description to the head of a page."""
    if doctree is not None and (text := first_words(doctree)):
        context["metatags"] += f'<meta name="description" content="{html.escape(text)}">'
