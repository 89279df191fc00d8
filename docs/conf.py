"""Sphinx: `sphinx-build -W docs docs/_build`."""

project = "gnn_spmm_plugin"
author = "The gnn_spmm_plugin authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "gnn-spmm-plugin"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["style.css"]
exclude_patterns = ["_build"]
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_rtype = False  # "(graph, order, inverse): ..." is no type
napoleon_custom_sections = [("Attributes", "params_style")]  # properties have entries of their own
myst_heading_anchors = 4
