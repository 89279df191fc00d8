"""``gnn-spmm report`` and ``gnn-spmm doctor``: what a graph, or a user's training script, gains, on one HTML page.

`graphs` looks at a graph; `script` runs a user's script in other processes, in which `trial` watches it; `verdict` says
what follows. These make dicts that JSON can hold. `sections` turns such a dict into a page, by `markup` and `charts`.
"""
