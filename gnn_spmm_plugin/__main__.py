"""``python -m gnn_spmm_plugin``: the same as ``gnn-spmm``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
