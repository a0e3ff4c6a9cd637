# SPDX-License-Identifier: Apache-2.0
"""How Sphinx builds the documentation site: `make docs`.

Every page is Markdown (MyST) that also reads well as a plain file. The pages in
notebooks/ are notebooks, which the build executes on the CPU. The reference is made
from the docstrings of the installed package. The build needs no network.
"""

import inspect
import os
import re
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from docutils import nodes
from jax.typing import DTypeLike
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import TypeAliasForwardRef

import jax_cudnn
from jax_cudnn.config import Implementation
from jax_cudnn.ops.common.arguments import Precision

# Keras reads it when the reference of its adapter is made.
os.environ["KERAS_BACKEND"] = "jax"

project = "jax_cudnn"
author = "The jax_cudnn authors"
project_copyright = f"2026, {author}"
release = version = jax_cudnn.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]

# MathJax comes with the site, so that formulas need no other host. The distribution is
# also an extension, which would make Sphinx read one page at a time.
_MATHJAX = distribution("sphinx-mathjax-offline")
html_static_path = [
    "_static",
    str(_MATHJAX.locate_file("sphinx-mathjax-offline/static")),
]
mathjax_path = "mathjax/tex-chtml.js"

# --- pages ----------------------------------------------------------------------------

# Anchors of headings are those that code hosts make, so links work in both places.
myst_heading_anchors = 4

# Executed anew in each build; an error in a cell is an error of the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

# --- reference ------------------------------------------------------------------------


def _without_overloads(analyzer: ModuleAnalyzer) -> None:
    """Read a module, so that each function is shown with one signature.

    Overloads differ in what they return, which the docstring says.
    """
    _read(analyzer)
    analyzer.overloads = {}


_read = ModuleAnalyzer.analyze
ModuleAnalyzer.analyze = _without_overloads  # type: ignore[method-assign]

# Sphinx 9.2 prints an alias within a union as this object prints itself.
TypeAliasForwardRef.__repr__ = lambda self: self.name  # type: ignore[method-assign]

# Types that are said by name, and where each is explained: JAX's there, and ours in the
# page of types, each under its heading.
_JAX = "https://docs.jax.dev/en/latest"
_PAGE = "api/types"
_TYPES = {
    "Array": f"{_JAX}/_autosummary/jax.Array.html",
    "ArrayLike": f"{_JAX}/jax.typing.html",
    "DTypeLike": f"{_JAX}/jax.typing.html",
    "jax.Array": f"{_JAX}/_autosummary/jax.Array.html",
}
_OURS = re.findall(
    r"^## (\w+)$", (Path(__file__).parent / f"{_PAGE}.md").read_text("utf-8"), re.M
)

# Modules that evaluate their annotations have these types themselves.
_NAMED: tuple[tuple[Any, str], ...] = (
    (Implementation, "Implementation"),
    (DTypeLike, "DTypeLike"),
    (Precision, "Precision"),
)


def _name_types(_: Sphinx, described: object, __: bool) -> None:
    """Say those types of a function by their names."""
    if not inspect.isfunction(described):
        return
    hints = described.__annotations__
    for argument, hint in hints.items():
        for kind, name in _NAMED:
            if hint == kind:
                hints[argument] = TypeAliasForwardRef(name)
            elif hint == kind | None:
                hints[argument] = TypeAliasForwardRef(name) | None


def _type_by_name(
    app: Sphinx, _: Any, node: nodes.Element, shown: nodes.Node
) -> nodes.reference | None:
    """Return a link to the page that explains a type."""
    target = node["reftarget"]
    if node["refdomain"] != "py" or target not in {*_TYPES, *_OURS}:
        return None
    if (address := _TYPES.get(target)) is not None:
        return nodes.reference("", "", shown, refuri=address)
    page = app.builder.get_relative_uri(node["refdoc"], _PAGE)
    address = f"{page}#{target.lower()}"
    return nodes.reference("", "", shown, refuri=address, internal=True)


def setup(app: Sphinx) -> None:
    """Name the types of the reference, and link their names."""
    app.connect("autodoc-before-process-signature", _name_types)
    app.connect("missing-reference", _type_by_name)


# In docstrings, `x` is code.
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
# A signature has names and defaults. Types are said where an argument is described.
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
# Defaults as they are written, not as they print.
autodoc_preserve_defaults = True
autodoc_type_aliases = {name: name for name in (*_TYPES, *_OURS)}
autosummary_generate = False
# A reference to a name of this package has to lead somewhere; those to others, and to
# types that are not public, need not.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!jax_cudnn\.).*"),
    (r"py:.*", r"jax_cudnn\.(config|doctor|fusing|graph)\..*"),
]
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# --- HTML -----------------------------------------------------------------------------

html_theme = "furo"
html_title = f"jax_cudnn {release}"
html_copy_source = False
html_css_files = ["site.css"]
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
