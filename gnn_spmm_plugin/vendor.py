"""The vendor's sparse product, by name alone: cuSPARSE, as `torch.sparse` calls it.

For comparisons, and for whoever trusts no other. It promises neither the same bits in every run nor that what is not
finite stays where it belongs, adds what comes to a sum in passes of torch's, and rounds half features twice.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._native import accumulation_dtype
from .csr import Csr, KeptWeight
from .tiles import factors


@dataclass(frozen=True, eq=False)
class VendorSparse:
    """A graph as a sparse matrix of torch; it shares the CSR arrays.

    Attributes:
        whole: whether cuSPARSE calls it a matrix: one with entries, and no more of them than there are places.
    """

    whole: bool
    _ones: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False)
    _weights: KeptWeight = field(default_factory=KeptWeight, repr=False)

    def takes(self, csr: Csr, weight: Tensor | None, x: Tensor) -> bool:
        """Whether it is for these operands: not for weights by heads."""
        return self.whole and (weight is None or weight.dim() == 1)

    def product(
        self,
        csr: Csr,
        weight: Tensor | None,
        x: Tensor,
        src_scale: Tensor | None,
        dst_scale: Tensor | None,
        mean: bool,
        self_x: Tensor | None = None,
        self_scale: Tensor | None = None,
        bias: Tensor | None = None,
        relu: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The sum or mean over the edges into each row, and its end, as ``_spmm``; `weight` in the caller's order.

        Raises:
            RuntimeError: under ``torch.use_deterministic_algorithms(True)``.
        """
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(
                "kernel 'cusparse' promises no deterministic results, which torch.use_deterministic_algorithms(True) "
                "asks for; use another kernel"
            )
        values = factors(csr, weight, src_scale, x.dtype, self._weights)
        sums = _matrix(csr, self._of_ones(csr, x.dtype) if values is None else values) @ x
        sums = sums.to(accumulation_dtype(x.dtype))
        if mean:
            sums = sums / csr.degree().clamp(min=1).unsqueeze(1)
        if dst_scale is not None:
            sums = sums * dst_scale.unsqueeze(1)
        if self_x is not None:
            own = self_x.to(sums.dtype)
            if self_scale is not None:
                own = own * self_scale.unsqueeze(1)
                # What a row's scale leaves out has no part in it, be it infinite.
                own = own if len(self_scale) == 1 else own.masked_fill(self_scale.unsqueeze(1) == 0, 0)
            sums = sums + own
        if bias is not None:
            sums = sums + bias
        return (sums.relu() if relu else sums).to(out_dtype or x.dtype)

    def _of_ones(self, csr: Csr, dtype: torch.dtype) -> Tensor:
        if dtype not in self._ones:
            self._ones[dtype] = torch.ones(csr.col.shape, dtype=dtype, device=csr.col.device)
        return self._ones[dtype]

    def nbytes(self) -> int:
        """Bytes of the ones that stand for no weights."""
        return sum(t.numel() * t.element_size() for t in self._ones.values())


def _matrix(csr: Csr, values: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that sparse CSR is in beta
        return torch.sparse_csr_tensor(
            csr.rowptr, csr.col, values, (csr.num_rows, csr.num_cols), check_invariants=False
        )


def prepare(csr: Csr) -> tuple[VendorSparse, tuple[str, ...]]:
    """The format of `csr`, and what to say about it."""
    whole = 0 < csr.col.shape[0] <= csr.num_rows * csr.num_cols
    how = "as torch.sparse calls it: not the same bits in every run"
    left = "left to the CSR arrays: no edges, or more than pairs of nodes, which cuSPARSE refuses"
    return VendorSparse(whole), (f"cusparse  {how if whole else left}",)


__all__ = ["VendorSparse", "prepare"]
