"""How the best fp32 kernel of others compared with the best of cuSPARSE: the yardstick of one line of the summary.

Measured on an NVIDIA H200, torch 2.11, cuSPARSE of CUDA 13, 2026-11-30, hot, weighted sum: GE-SpMM, dgSPARSE, Sputnik,
HP-SpMM, RoDe, ParamSpMM (the best of all its configurations) and RA-SpMM's CSR kernels. Absolute times hold for that
run only; ratios carry over.
"""

from __future__ import annotations

#: graph -> width -> (best cuSPARSE, best peer), milliseconds
PEERS: dict[str, dict[int, tuple[float, float]]] = {
    "er1M_d10": {32: (0.528, 0.420), 64: (1.018, 0.730), 128: (1.740, 1.431), 256: (3.469, 2.711)},
    "rmat20_16M": {32: (0.712, 0.376), 64: (1.163, 0.610), 128: (1.493, 1.164), 256: (2.857, 2.302)},
    "road1M": {32: (0.315, 0.162), 64: (0.345, 0.267), 128: (0.506, 0.446), 256: (0.995, 0.681)},
    "arxivlike": {32: (0.064, 0.062), 64: (0.126, 0.101), 128: (0.233, 0.190), 256: (0.438, 0.358)},
    "sbm1M_shuf": {32: (0.570, 0.503), 64: (1.131, 0.916), 128: (2.255, 1.812)},
    "sbm1M_sorted": {32: (0.559, 0.416), 64: (1.119, 0.653), 128: (1.419, 1.123), 256: (2.799, 2.225)},
    "ddi_like": {32: (0.081, 0.047), 64: (0.082, 0.099), 128: (0.136, 0.150), 256: (0.260, 0.266)},
    "redditlike_sorted": {32: (1.667, 1.199), 64: (3.508, 2.377), 128: (6.472, 4.776), 256: (12.989, 9.615)},
    "productslike_sorted": {32: (3.757, 2.148), 64: (7.405, 3.748), 128: (8.773, 7.511), 256: (17.993, 15.392)},
    "ra_mixed_v3": {32: (0.137, 0.104), 64: (0.301, 0.241), 128: (0.653, 0.464), 256: (1.336, 0.900)},
    "ra_community_nc100": {32: (0.067, 0.045), 64: (0.132, 0.074), 128: (0.153, 0.114), 256: (0.281, 0.175)},
    "ra_sparse_uniform_d8": {32: (0.107, 0.071), 64: (0.217, 0.145), 128: (0.399, 0.292), 256: (0.773, 0.587)},
    "ra_dense_small_d90": {32: (0.022, 0.018), 64: (0.031, 0.029), 128: (0.053, 0.045), 256: (0.101, 0.083)},
}
