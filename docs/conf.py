"""Sphinx: `sphinx-build -W docs docs/_build`."""

project = "gnn_spmm_plugin"
author = "The gnn_spmm_plugin authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = project
exclude_patterns = ["_build"]
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # attributes that a class describes may have a page entry of their own
myst_heading_anchors = 4
