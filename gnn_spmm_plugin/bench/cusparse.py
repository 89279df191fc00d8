"""cuSPARSE's SpMM, called directly: the library that torch brings, every CSR algorithm, preprocessing done beforehand.

torch.sparse.mm allocates, prepares and describes its operands in each call, and knows one algorithm. `Product` does all
of that once, so that what is timed is `cusparseSpMM` alone. Types, constants and signatures are those of ``cusparse.h``
(12.x); a test compares them with the header where a CUDA toolkit is installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Constants of ``cusparse.h`` and ``library_types.h``, by their names there.
ENUMS = {
    "CUSPARSE_STATUS_SUCCESS": 0,
    "CUSPARSE_OPERATION_NON_TRANSPOSE": 0,
    "CUSPARSE_INDEX_32I": 2,
    "CUSPARSE_INDEX_BASE_ZERO": 0,
    "CUSPARSE_ORDER_ROW": 2,
    "CUSPARSE_SPMM_ALG_DEFAULT": 0,
    "CUSPARSE_SPMM_CSR_ALG1": 4,
    "CUSPARSE_SPMM_CSR_ALG2": 6,
    "CUSPARSE_SPMM_CSR_ALG3": 12,
    "CUDA_R_32F": 0,
    "CUDA_R_64F": 1,
    "CUDA_R_16F": 2,
    "CUDA_R_16BF": 14,
}
#: The algorithms that take CSR, by the name that a contender has.
ALGORITHMS = {
    "default": "CUSPARSE_SPMM_ALG_DEFAULT",
    "csr_alg1": "CUSPARSE_SPMM_CSR_ALG1",
    "csr_alg2": "CUSPARSE_SPMM_CSR_ALG2",
    "csr_alg3": "CUSPARSE_SPMM_CSR_ALG3",
}
TYPES = {
    torch.float32: "CUDA_R_32F",
    torch.float64: "CUDA_R_64F",
    torch.float16: "CUDA_R_16F",
    torch.bfloat16: "CUDA_R_16BF",
}

_enum = c_int  # every enum of the header fits an int
_spmm = [c_void_p, _enum, _enum, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, _enum, _enum]
#: Argument types of the functions that are called; each but the last returns a status.
SIGNATURES: dict[str, list[Any]] = {
    "cusparseCreate": [POINTER(c_void_p)],
    "cusparseSetStream": [c_void_p, c_void_p],
    "cusparseGetVersion": [c_void_p, POINTER(c_int)],
    "cusparseCreateCsr": [
        *(POINTER(c_void_p), c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p),
        *(_enum, _enum, _enum, _enum),
    ],
    "cusparseDestroySpMat": [c_void_p],
    "cusparseCreateDnMat": [POINTER(c_void_p), c_int64, c_int64, c_int64, c_void_p, _enum, _enum],
    "cusparseDestroyDnMat": [c_void_p],
    "cusparseSpMM_bufferSize": [*_spmm, POINTER(c_size_t)],
    "cusparseSpMM_preprocess": [*_spmm, c_void_p],
    "cusparseSpMM": [*_spmm, c_void_p],
    "cusparseGetErrorString": [_enum],
}


def _candidates() -> list[str]:
    """Where the library may be: what this process has loaded, then torch's wheels, then the system's."""
    found: list[str] = []
    maps = Path("/proc/self/maps")
    if maps.exists():
        found += re.findall(r"(/\S*/libcusparse\.so\S*)", maps.read_text())
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec is not None else []:
        found += map(str, sorted(Path(folder).glob("*/lib/libcusparse.so*")))
    return [*dict.fromkeys(found), "libcusparse.so.12", "libcusparse.so.11", "libcusparse.so"]


@cache
def library() -> ctypes.CDLL:
    """The loaded library, its functions typed.

    Raises:
        OSError: there is none.
    """
    reasons = []
    for path in _candidates():
        try:
            lib = ctypes.CDLL(path)
            for name, arguments in SIGNATURES.items():
                function = getattr(lib, name)
                function.argtypes, function.restype = arguments, c_int
            lib.cusparseGetErrorString.restype = c_char_p
            return lib
        except (OSError, AttributeError) as e:
            reasons.append(str(e))
    raise OSError(f"no usable libcusparse: {'; '.join(reasons)}")


def unavailable() -> str | None:
    """Why cuSPARSE cannot be called here, or None."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    try:
        library()
    except OSError as e:
        return str(e)
    return None


def _check(status: int, what: str) -> None:
    if status != ENUMS["CUSPARSE_STATUS_SUCCESS"]:
        text = library().cusparseGetErrorString(status)
        raise RuntimeError(f"{what}: {text.decode() if text else 'unknown error'} (status {status})")


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # so that there is a context
        _check(library().cusparseCreate(byref(handle)), "cusparseCreate")
    return handle


def version() -> str:
    """The version of the library, such as ``12.6.3``; needs a GPU."""
    number = c_int()
    _check(library().cusparseGetVersion(_handle(torch.cuda.current_device()), byref(number)), "cusparseGetVersion")
    return f"{number.value // 1000}.{number.value % 1000 // 100}.{number.value % 100}"


class Product:
    """``out = A @ x`` for fixed tensors, ready to be called; each call only launches, on torch's current stream.

    Args:
        rowptr: ``[M + 1]`` int32.
        col: ``[E]`` int32.
        values: ``[E]``, of `x`'s dtype.
        x: ``[N, F]``, contiguous; float32, float64, float16 or bfloat16. Halves are accumulated in float32.
        out: ``[M, F]``, contiguous, of `x`'s dtype.
        algorithm: a key of `ALGORITHMS`.

    Raises:
        RuntimeError: cuSPARSE refuses; the message is its own.
    """

    def __init__(self, rowptr: Tensor, col: Tensor, values: Tensor, x: Tensor, out: Tensor, algorithm: str) -> None:
        lib = library()
        rows, nnz, width = rowptr.numel() - 1, col.numel(), x.shape[1]
        if not all(t.is_contiguous() and t.is_cuda for t in (rowptr, col, values, x, out)):
            raise ValueError("cuSPARSE takes contiguous CUDA tensors only here")
        if rowptr.dtype != torch.int32 or col.dtype != torch.int32 or not values.dtype == x.dtype == out.dtype:
            raise ValueError(f"expected int32 indices and one dtype, got {rowptr.dtype}, {values.dtype}, {x.dtype}")
        if values.numel() != nnz or tuple(out.shape) != (rows, width):
            raise ValueError(f"shapes do not fit: {list(values.shape)}, {list(x.shape)}, {list(out.shape)}")
        self._tensors = rowptr, col, values, x, out  # what the descriptors point at
        self.out = out
        kind = ENUMS[TYPES[x.dtype]]
        double = x.dtype == torch.float64
        scalar = c_double if double else c_float
        self._scalars = scalar(1), scalar(0)
        index, base, order = (
            ENUMS[k] for k in ("CUSPARSE_INDEX_32I", "CUSPARSE_INDEX_BASE_ZERO", "CUSPARSE_ORDER_ROW")
        )
        self._matrix, self._dense = c_void_p(), (c_void_p(), c_void_p())
        self._handle, self._lib = _handle(x.device.index), lib
        self._spmm, self._set_stream = lib.cusparseSpMM, lib.cusparseSetStream
        pointers = rowptr.data_ptr(), col.data_ptr(), values.data_ptr()
        self._do("cusparseCreateCsr", byref(self._matrix), rows, x.shape[0], nnz, *pointers, index, index, base, kind)
        for descriptor, t in zip(self._dense, (x, out), strict=True):
            self._do("cusparseCreateDnMat", byref(descriptor), *t.shape, width, t.data_ptr(), kind, order)
        one, zero = (byref(s) for s in self._scalars)
        plain = ENUMS["CUSPARSE_OPERATION_NON_TRANSPOSE"]
        self._arguments: tuple[Any, ...] = (
            *(self._handle, plain, plain, one, self._matrix, self._dense[0], zero, self._dense[1]),
            ENUMS["CUDA_R_64F" if double else "CUDA_R_32F"],
            ENUMS[ALGORITHMS[algorithm]],
        )
        self._set_stream(self._handle, torch.cuda.current_stream(x.device).cuda_stream)
        size = c_size_t()
        self._do("cusparseSpMM_bufferSize", *self._arguments, byref(size))
        # The library keeps what it prepares there: one workspace a product, for as long as the product lives.
        self._workspace = torch.empty(max(size.value, 16), dtype=torch.uint8, device=x.device)
        self._arguments = (*self._arguments, c_void_p(self._workspace.data_ptr()))
        self._do("cusparseSpMM_preprocess", *self._arguments)

    def _do(self, function: str, *arguments: Any) -> None:
        _check(getattr(self._lib, function)(*arguments), function)

    def __call__(self) -> Tensor:
        """Launches, and returns `out`."""
        self._set_stream(self._handle, torch.cuda.current_stream().cuda_stream)
        status = self._spmm(*self._arguments)
        if status:
            _check(status, "cusparseSpMM")
        return self.out

    def __del__(self) -> None:
        # Before the workspace: what was prepared lies in it.
        if getattr(self, "_matrix", None):
            self._lib.cusparseDestroySpMat(self._matrix)
        for descriptor in getattr(self, "_dense", ()):
            if descriptor:
                self._lib.cusparseDestroyDnMat(descriptor)
