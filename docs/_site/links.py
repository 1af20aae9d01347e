"""Links the types in signatures to their documentation on the API pages.

Annotations name types as the modules import them (`SourceLike`); the pages document them
under their public names. Built-in types do not become links, even if other objects have
the same name.
"""

from __future__ import annotations

import builtins

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

# Subsets of the options that `LoadOptions` documents.
PARTS = {"ModuleOptions", "OpenOptions", "PinnedOptions", "PlanOptions", "StreamOptions"}


def drop_builtins(app: Sphinx, doctree: nodes.document) -> None:
    """Remove references to built-ins. Sphinx would link `bytes` to an attribute of some class."""
    for node in list(doctree.findall(addnodes.pending_xref)):
        if node.get("refdomain") == "py" and hasattr(builtins, node.get("reftarget", "")) and node.get("reftype") == "class":
            node.replace_self(node.children)


def resolve(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.TextElement) -> nodes.Element | None:
    """Find the only documented class or type with the same last name as the target."""
    if node.get("refdomain") != "py":
        return None
    last = node["reftarget"].rpartition(".")[2]
    last = "LoadOptions" if last in PARTS else last
    objects = env.domains.python_domain.objects
    found = {name for name, entry in objects.items() if name.rpartition(".")[2] == last and entry.objtype in ("class", "data", "exception")}
    if len(found) != 1:
        return None
    (name,) = found
    return make_refnode(app.builder, node["refdoc"], objects[name].docname, objects[name].node_id, [content], name)
