"""One graph over several processes: training on all of it, with rows, features and traffic shared between the ranks.

    sharded = ShardedGraph.from_edge_index(edge_index, num_nodes, order="community")
    x = sharded.shard(x)                  # this rank's rows
    y = sharded.spmm(x, reduce="mean")    # what other ranks have is fetched, and gradients go back to them

Every rank calls the same operations in the same order, as with everything in `torch.distributed`.
"""

from .blocks import Blocks
from .cost import partition_cost
from .gradients import all_reduce_gradients
from .sharded import ShardedGraph

__all__ = ["Blocks", "ShardedGraph", "all_reduce_gradients", "partition_cost"]
