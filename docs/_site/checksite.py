"""Check the built site: python docs/_site/checksite.py FOLDER

All links inside the site must lead to existing pages and anchors, all pages from Markdown
must have a description for search engines, and no page may load anything (a script, a
style, a font, a picture) from another host.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

# Attributes that make a browser load something without user action.
LOADS = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("object", "data")}


class Page(HTMLParser):
    """The anchors and links of a page, and the resources that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.described = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.described |= tag == "meta" and ("name", "description") in attrs
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            if (tag, name) in LOADS and value and not (tag == "link" and ("rel", "canonical") in attrs):
                self.loads.append(value)
            elif tag == "a" and name == "href" and value:
                self.links.append(value)


def faults(site: Path) -> list[str]:
    """Return a line for each fault of a site."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    out = []
    for path, page in sorted(pages.items()):
        where = path.relative_to(site.resolve())
        out += [f"{where} loads {one}" for one in page.loads if re.match(r"(\w+:)?//", one)]
        if where.parts[0] == "docs" and not page.described:
            out.append(f"{where} has no description: begin the page with a sentence")
        for link in page.links + page.loads:
            if re.match(r"(\w+:|//)", link) or where.name in ("search.html", "genindex.html") and link == "#":
                continue
            target, _, place = unquote(link.partition("?")[0]).partition("#")
            to = (path.parent / target).resolve() if target else path
            if not to.exists():
                out.append(f"{where} links to {link}, which is not there")
            elif place and to in pages and place not in pages[to].places:
                out.append(f"{where} links to {link}: no such place")
    for style in site.rglob("*.css"):
        found = re.findall(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""", style.read_text(encoding="utf-8"))
        out += [f"{style.relative_to(site)} loads {one}" for one in found]
    return out if pages else [f"no page in {site}"]


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    print("\n".join(wrong))
    sys.exit(bool(wrong))
