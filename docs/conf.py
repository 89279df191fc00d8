"""Sphinx: `sphinx-build -W docs docs/_build`."""

project = "gnn_spmm_plugin"
author = "The gnn_spmm_plugin authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["_build"]
autodoc_typehints = "none"
default_role = "code"
