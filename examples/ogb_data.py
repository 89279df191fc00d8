"""OGB's data sets, splits and evaluators, or stand-ins, and the options of the four examples that use them."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import stand_in
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

MODELS = {"gcn": GCN, "sage": GraphSAGE, "gin": GIN, "gat": GAT}


def add_options(made: argparse.ArgumentParser, *, layers: int, dropout: float, eval_steps: int = 1) -> None:
    """Options of the OGB examples, beside those of `common.parser`."""
    made.add_argument("--model", choices=MODELS, default="gcn")
    made.add_argument("--layers", type=int, default=layers)
    made.add_argument("--dropout", type=float, default=dropout)
    made.add_argument("--eval-steps", type=int, default=eval_steps, help="epochs from one evaluation to the next")
    made.add_argument("--amp", choices=["bf16"], help="forward under autocast")
    made.add_argument("--compile", action="store_true", help="torch.compile the model, plugin and all")
    made.add_argument("--root", default="dataset", help="folder of OGB's data, which is downloaded if missing")
    made.add_argument("--stand-in", action="store_true", help="a generated graph of the published size instead")
    made.add_argument("--scale", type=float, default=1.0, help="share of the stand-in's nodes and edges")


def extras(options: argparse.Namespace, accelerate: bool, whole_graph: bool = True) -> dict[str, Any]:
    """Arguments that one kind of model takes: GCN's normalisation is computed once, as in OGB's own baselines.

    Compiled, the plugin takes a GCNConv that is not ``cached``, and computes the normalisation once all the same.
    """
    cached = whole_graph and not (accelerate and options.compile)
    return {"gcn": {"cached": cached}, "gat": {"heads": 4}}.get(options.model, {})


def autocast(options: argparse.Namespace) -> torch.autocast:
    """What the forward pass runs under: nothing special, or bfloat16 with ``--amp bf16``."""
    return torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=options.amp == "bf16")


def nodes(
    name: str, options: argparse.Namespace, device: str | None = None
) -> tuple[Data, dict[str, Tensor], Callable[[Tensor, Tensor], float]]:
    """Data on the device, the nodes of each part of the split, and the metric, a function of labels and predictions.

    `device` is another one than ``options.device`` for data that is yet to be cut.
    """
    device = device or options.device
    if options.stand_in:
        data, split = stand_in.nodes(name, options.scale, device)
        metric = stand_in.rocauc if name == "ogbn-proteins" else stand_in.accuracy
    else:
        with _found(name, options.root), _readable():
            from ogb.nodeproppred import Evaluator, PygNodePropPredDataset

            dataset = PygNodePropPredDataset(name, options.root)
            data, split, evaluator = dataset[0], dataset.get_idx_split(), Evaluator(name)

        def metric(y_true: Tensor, y_pred: Tensor) -> float:
            return float(evaluator.eval({"y_true": y_true, "y_pred": y_pred})[evaluator.eval_metric])

    _say(name, options, data)
    return data.to(device), {k: v.to(device) for k, v in split.items()}, metric


def links(
    name: str, options: argparse.Namespace
) -> tuple[Data, dict[str, dict[str, Tensor]], Callable[[Tensor, Tensor], float]]:
    """Data with the training edges, the edges of each part, and the metric of scores of edges and of non-edges."""
    if options.stand_in:
        data, split = stand_in.links(name, options.scale, options.device)
        metric = stand_in.hits
    else:
        with _found(name, options.root), _readable():
            from ogb.linkproppred import Evaluator, PygLinkPropPredDataset

            dataset = PygLinkPropPredDataset(name, options.root)
            data, split, evaluator = dataset[0], dataset.get_edge_split(), Evaluator(name)

        def metric(positive: Tensor, negative: Tensor) -> float:
            found = evaluator.eval({"y_pred_pos": positive, "y_pred_neg": negative})
            return float(found[evaluator.eval_metric])

    _say(name, options, data)
    split = {part: {k: v.to(options.device) for k, v in edges.items()} for part, edges in split.items()}
    return data.to(options.device), split, metric


def _say(name: str, options: argparse.Namespace, data: Data) -> None:
    what = f"generated stand-in for {name}, scale {options.scale:g}" if options.stand_in else name
    print(f"{what}: {data.num_nodes:,} nodes, {data.edge_index.shape[1]:,} edges; {options.model} on {options.device}")


@contextmanager
def _found(name: str, root: str) -> Iterator[None]:
    """Ends the program with exit code 2 and a way out where the package ``ogb`` or the data is missing."""
    folder = Path(root, name.replace("-", "_"))
    there = folder.exists()
    try:
        yield
    except ImportError as error:
        reason = f"{error}; `pip install ogb` brings OGB's loaders and evaluators"
    except (OSError, EOFError, SystemExit) as error:  # no network; no terminal for OGB's question; the answer was no
        if there:
            raise
        shutil.rmtree(folder, ignore_errors=True)  # OGB takes what is left of a failed download for an old version
        reason = (
            f"it is not in {folder} and was not downloaded ({type(error).__name__}: {error}). Run this where there is "
            f"a network, or fetch {_address(name)} there, unpack it in {root} and rename the folder to {folder.name}"
        )
    else:
        return
    print(f"{name} cannot be loaded: {reason}.\n--stand-in trains on a generated graph instead.", file=sys.stderr)
    raise SystemExit(2)


def _address(name: str) -> str:
    import ogb
    import pandas

    kind = "linkproppred" if name.startswith("ogbl") else "nodeproppred"
    return str(pandas.read_csv(Path(ogb.__path__[0], kind, "master.csv"), index_col=0)[name]["url"])


@contextmanager
def _readable() -> Iterator[None]:
    """Lets `torch.load` read what OGB saved, meanwhile: it reads nothing but tensors since torch 2.6.

    OGB 1.3.6 calls it without ``weights_only``. Its processed files hold PyG's `Data`, its splits numpy's arrays, under
    the name that numpy's module had before 2.0.
    """
    import numpy
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    reconstruct = numpy.empty(0).__reduce__()[0]
    allowed = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage, numpy.ndarray, numpy.dtype]
    allowed += [type(numpy.dtype(kind)) for kind in ("int64", "int32", "float32", "float64", "bool")]
    allowed += [(reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    already = torch.serialization.get_safe_globals()  # by PyG; `safe_globals` would take these back too
    with torch.serialization.safe_globals([one for one in allowed if one not in already]):
        yield
