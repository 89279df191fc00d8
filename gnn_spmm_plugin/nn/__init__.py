"""Layers that aggregate in one kernel, with PyG's arguments and parameters; real PyG modules where PyG is installed."""

from .aggregation import SpMMAggregation
from .conv import SpMMConv
from .gat import GATConv
from .gcn import GCNConv
from .gin import GINConv
from .sage import SAGEConv

__all__ = ["GATConv", "GCNConv", "GINConv", "SAGEConv", "SpMMAggregation", "SpMMConv"]
