# SPDX-License-Identifier: Apache-2.0
"""How Sphinx builds the documentation site: `make docs`.

Every page is Markdown (MyST) that also reads well as a plain file. The pages in
notebooks/ are notebooks, which the build executes on the CPU. The reference is made
from the docstrings of the installed package. The build needs no network.
"""

import os
from importlib.metadata import distribution

from sphinx.pycode import ModuleAnalyzer

import jax_cudnn

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
html_static_path = [str(_MATHJAX.locate_file("sphinx-mathjax-offline/static"))]
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

# In docstrings, `x` is code.
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
# Defaults as they are written, not as they print.
autodoc_preserve_defaults = True
autodoc_type_aliases = {
    "ArrayLike": "ArrayLike",
    "DTypeLike": "DTypeLike",
    "Activation": "Activation",
    "Implementation": "Implementation",
    "Layout": "Layout",
    "Precision": "Precision",
    "ScoreMod": "ScoreMod",
}
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
python_maximum_signature_line_length = 72

# --- HTML -----------------------------------------------------------------------------

html_theme = "furo"
html_title = f"jax_cudnn {release}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
