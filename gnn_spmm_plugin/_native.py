"""The compiled libraries: found, loaded, described; and the shapes of what their operators return.

Importing this never fails. Where a library is missing or does not load, the reason is kept and raised by
`require` at the first use, so that `import gnn_spmm_plugin` works on every machine.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import struct
from typing import Any

import torch
from torch import Tensor

from . import _platform
from ._platform import REBUILD

NAMESPACE = "gnn_spmm_plugin"
#: dtypes of features and weights that there are kernels for
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_OPS = (
    "spmm row_sum pcsr_spmm tile_spmm tile_end spmm_arg spmm_arg_backward spmm_tie_count spmm_tie_backward sddmm "
    "sddmm_arg sddmm_tie pair_score pair_gradient edge_sum edge_sum_backward edge_sum_dot edge_softmax "
    "edge_softmax_backward from_coo transpose inverse_degree gcn_scales same_coo"
).split()


def _find(name: str) -> str | None:
    """The path of a file that the build installed beside the package, or None."""
    import gnn_spmm_plugin

    folders = list(gnn_spmm_plugin.__path__)
    try:  # run from a source tree while an installed copy holds the libraries
        dist = importlib.metadata.distribution("gnn-spmm-plugin")
        folders.append(str(dist.locate_file("gnn_spmm_plugin")))
    except importlib.metadata.PackageNotFoundError:
        pass
    paths = (os.path.join(folder, name) for folder in folders)
    return next((p for p in paths if os.path.exists(p)), None)


def _load_cpu() -> str | None:
    if (elsewhere := _platform.other_system()) is not None:
        return elsewhere
    path = _find("_gnn_spmm_cpu.so")
    if path is None:
        return "its compiled library _gnn_spmm_cpu.so is missing; install the package with `pip install .`"
    try:
        _load(path)
    except OSError as e:
        return (
            f"{path}, built for torch {build_info().get('torch_target', '2.10')} and newer, does not load under torch "
            f"{torch.__version__} ({e.__cause__ or e}); update torch if it is older, else reinstall the package with "
            f"{REBUILD}"
        )
    return _lacks(path, *_OPS, "kernel_calls")


def _load(path: str) -> None:
    """Loads a library; OSError where that fails, or the file is torn, which would end the process."""
    with open(path, "rb") as f:
        head = f.read(64)
        if head[:5] == b"\x7fELF\x02" and len(head) == 64:  # its table of sections comes last
            (start,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
            if f.seek(0, os.SEEK_END) < start + size * count:
                raise OSError("the file is torn: its end is missing")
    torch.ops.load_library(path)


def _lacks(path: str, *names: str) -> str | None:
    """What is wrong with a library that loaded, but is of another version of this package."""
    lacking = [name for name in names if not hasattr(getattr(torch.ops, NAMESPACE), "_" + name)]
    if not lacking:
        return None
    return (
        f"{path} is of another version of the package: it has no {', '.join(lacking[:3])}; reinstall the package with "
        f"{REBUILD}, or build it again where it was built in place"
    )


def _load_cuda() -> str | None:
    if cpu_error is not None:
        return cpu_error
    path = _find("_gnn_spmm_cuda.so")
    if (error := _platform.torch_without_cuda(path is not None)) is not None:
        return error
    if path is None:
        why = build_info().get("cuda_reason") or "no nvcc was found"
        first = "" if why.startswith("switched off") else "install the CUDA toolkit, then "
        return (
            f"the package was built without CUDA ({why}); {first}reinstall with "
            "`GSP_CUDA=ON pip install --force-reinstall --no-deps .`"
        )
    try:
        _load(path)
    except OSError as e:
        return (
            f"{path}, built with CUDA {build_info().get('cuda_version')}, does not load under torch "
            f"{torch.__version__} for CUDA {torch.version.cuda} ({e.__cause__ or e}); update torch if it is older than "
            f"{build_info().get('torch_target', '2.10')}, else reinstall the package with {REBUILD}"
        )
    return _lacks(path, "kernel_calls_cuda") or _platform.old_driver(build_info())


def build_info() -> dict[str, Any]:
    """What the build wrote down: compilers, CUDA architectures, torch headers; {} where there is no build."""
    path = _find("_build_info.json")
    if path is None:
        return {}
    with open(path) as f:
        return dict(json.load(f))


cpu_error: str | None = _load_cpu()
cuda_error: str | None = _load_cuda()


def require(device: torch.device) -> None:
    """Raises RuntimeError with the reason when there are no kernels for `device`."""
    if device.type in ("cpu", "meta"):
        error = cpu_error
    elif device.type == "cuda":
        error = cuda_error
    else:
        error = "there are kernels for cpu and cuda only; move the tensors with .to('cpu') or .to('cuda')"
    if error is not None:
        raise RuntimeError(f"gnn_spmm_plugin has no kernels for {device}: {error}")


def kernel_calls() -> int:
    """How often a kernel of this package ran in this process (CPU and CUDA), counted where it runs."""
    calls = 0
    if cpu_error is None:
        calls += int(torch.ops.gnn_spmm_plugin._kernel_calls())
    if cuda_error is None:
        calls += int(torch.ops.gnn_spmm_plugin._kernel_calls_cuda())
    return calls


def translated(error: RuntimeError) -> RuntimeError:
    """What a failure inside an operator is raised as: there is no `torch.OutOfMemoryError` in C++."""
    text = str(error)
    return torch.OutOfMemoryError(text) if "out of memory" in text else error


def _direct(name: str) -> Any:
    """An operator as the dispatcher takes it: the least that a call can cost, and nothing torch.compile sees through.

    Not the packet, which costs 0.9 us more, nor the overload (0.4), but what that calls itself.
    """
    if cpu_error is not None:
        return _bind(name)
    return _overload(name)._op


def _overload(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), "_" + name).default


def _bind(name: str) -> Any:
    if cpu_error is not None:

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"gnn_spmm_plugin cannot run {name}: {cpu_error}")

        return missing
    overload, direct = _overload(name), _direct(name)

    def op(*args: Any, **kwargs: Any) -> Any:
        try:
            return (overload if torch.compiler.is_compiling() else direct)(*args, **kwargs)
        except RuntimeError as error:
            raise translated(error) from None

    return op


(
    spmm,
    row_sum,
    pcsr_spmm,
    tile_spmm,
    tile_end,
    spmm_arg,
    spmm_arg_backward,
    spmm_tie_count,
    spmm_tie_backward,
    sddmm,
    sddmm_arg,
    sddmm_tie,
    pair_score,
    pair_gradient,
    edge_sum,
    edge_sum_backward,
    edge_sum_dot,
    edge_softmax,
    edge_softmax_backward,
    from_coo,
    transpose,
    inverse_degree,
    gcn_scales,
    same_coo,
) = (_bind(name) for name in _OPS)
row_sum_eager = _direct("row_sum")


def autocasts(device_type: str) -> bool:
    """Whether autocast is on, for a kind of device; there is none for "meta", where torch raises at the question."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows(rowptr: Tensor) -> Any:
    return rowptr.shape[0] - 1


def _edge_shape(col: Tensor, heads: int) -> tuple[Any, ...]:
    return (col.shape[0], heads) if heads else (col.shape[0],)


def _fake_spmm(
    rowptr: Tensor,
    col: Tensor,
    weight: Tensor | None,
    x: Tensor,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    items: Tensor | None,
    config: list[int],
    mean: bool,
    self_x: Tensor | None = None,
    self_scale: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
    out_dtype: torch.dtype | None = None,
    stage: Tensor | None = None,
    sources: int = 0,
) -> Tensor:
    return x.new_empty((_rows(rowptr), x.shape[1]), dtype=out_dtype)


def _fake_row_sum(rowptr: Tensor, col: Tensor, x: Tensor, lengths: int, mean: bool = False) -> Tensor:
    return x.new_empty((_rows(rowptr), x.shape[1]))


def _fake_pcsr_spmm(
    rowptr: Tensor,
    ptr: Tensor,
    col: Tensor,
    target: Tensor | None,
    merges: Tensor | None,
    weight: Tensor | None,
    x: Tensor,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    config: list[int],
    mean: bool,
    self_x: Tensor | None = None,
    self_scale: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return x.new_empty((_rows(rowptr), x.shape[1]), dtype=out_dtype)


def _fake_tile_spmm(
    rowptr: Tensor,
    col: Tensor,
    weight: Tensor | None,
    ptr: Tensor,
    vectors: Tensor,
    bits: Tensor,
    values: Tensor | None,
    rows: Tensor | None,
    target: Tensor | None,
    merges: Tensor | None,
    x: Tensor,
    dst_scale: Tensor | None,
    config: list[int],
    mean: bool,
    self_x: Tensor | None = None,
    self_scale: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return x.new_empty((_rows(rowptr), config[3]), dtype=out_dtype)


def _fake_tile_end(
    rowptr: Tensor,
    col: Tensor,
    weight: Tensor | None,
    x: Tensor,
    sums: Tensor,
    dst_scale: Tensor | None,
    mean: bool,
    self_x: Tensor | None = None,
    self_scale: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return x.new_empty((_rows(rowptr), x.shape[1]), dtype=out_dtype)


def _fake_spmm_arg(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    weight: Tensor | None,
    x: Tensor,
    items: Tensor | None,
    config: list[int],
    minimum: bool,
    with_arg: bool = True,
) -> tuple[Tensor, Tensor]:
    rows, width = _rows(rowptr), x.shape[1]
    return x.new_empty((rows, width)), rowptr.new_empty((rows if with_arg else 0, width))


def _fake_spmm_arg_backward(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    weight: Tensor | None,
    grad: Tensor,
    arg: Tensor,
    items: Tensor | None,
    config: list[int],
) -> Tensor:
    return grad.new_empty((_rows(rowptr), grad.shape[1]))


def _fake_spmm_tie_count(
    rowptr: Tensor,
    col: Tensor,
    weight: Tensor | None,
    x: Tensor,
    out: Tensor,
    items: Tensor | None,
    config: list[int],
    grad: Tensor | None = None,
    zero_wins: bool = False,
) -> Tensor:
    dtype = accumulation_dtype(x.dtype) if grad is None else x.dtype
    return x.new_empty((_rows(rowptr), x.shape[1]), dtype=dtype)


def _fake_spmm_tie_backward(
    rowptr: Tensor,
    col: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    x: Tensor,
    out: Tensor,
    items: Tensor | None,
    config: list[int],
) -> Tensor:
    return x.new_empty((_rows(rowptr), x.shape[1]))


def _fake_sddmm(rowptr: Tensor, col: Tensor, perm: Tensor | None, a: Tensor, b: Tensor, heads: int) -> Tensor:
    return a.new_empty(_edge_shape(col, heads))


def _fake_sddmm_arg(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    grad: Tensor,
    x: Tensor,
    arg: Tensor,
    heads: int,
) -> Tensor:
    return grad.new_empty(_edge_shape(col, heads))


def _fake_sddmm_tie(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    weight: Tensor | None,
    grad: Tensor,
    x: Tensor,
    out: Tensor,
    heads: int,
) -> Tensor:
    return grad.new_empty(_edge_shape(col, heads))


def _fake_pair_score(
    rowptr: Tensor, col: Tensor, perm: Tensor | None, a: Tensor, b: Tensor, att: Tensor, slope: float
) -> Tensor:
    return a.new_empty(_edge_shape(col, att.shape[0]))


def _fake_pair_gradient(
    rowptr: Tensor, col: Tensor, perm: Tensor | None, grad: Tensor, a: Tensor, b: Tensor, att: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), a.new_empty((a.shape[1],), dtype=accumulation_dtype(a.dtype))


def _fake_edge_sum(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    weight: Tensor | None,
    x: Tensor,
    e: Tensor,
    items: Tensor | None,
    config: list[int],
    mean: bool,
) -> Tensor:
    return x.new_empty((_rows(rowptr), x.shape[1]))


def _fake_edge_sum_backward(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    weight: Tensor | None,
    x: Tensor,
    e: Tensor,
    grad: Tensor,
    items: Tensor | None,
    config: list[int],
    with_edges: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((col.shape[0] if with_edges else 0, x.shape[1]))


def _fake_edge_sum_dot(rowptr: Tensor, col: Tensor, perm: Tensor | None, grad: Tensor, x: Tensor, e: Tensor) -> Tensor:
    return grad.new_empty(col.shape)


def _fake_edge_softmax(rowptr: Tensor, perm: Tensor | None, logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


def _fake_edge_softmax_backward(rowptr: Tensor, perm: Tensor | None, p: Tensor, grad: Tensor) -> Tensor:
    return p.new_empty(p.shape)


def _fake_transpose(dst: Tensor, src: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    return dst.new_empty((num_src + 1,)), dst.new_empty(dst.shape), dst.new_empty(dst.shape)


def _fake_inverse_degree(rowptr: Tensor, dtype: torch.dtype) -> Tensor:
    return rowptr.new_empty((_rows(rowptr),), dtype=dtype)


def _fake_gcn_scales(rowptr: Tensor, col: Tensor, loops: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = _rows(rowptr)
    return rowptr.new_empty((rows,), dtype=dtype), rowptr.new_empty((rows if loops else 0,), dtype=dtype)


if cpu_error is None:
    for _name in _OPS:
        if _name not in ("from_coo", "same_coo"):  # what they return depends on values, which fake tensors have not
            torch.library.register_fake(f"{NAMESPACE}::_{_name}", globals()[f"_fake_{_name}"])
