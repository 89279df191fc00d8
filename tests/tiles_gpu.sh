#!/usr/bin/env bash
# What the kernels tile and dense have to pass on a GPU after a change: tests, every sanitizer, times.
# From the root, with the package built there; FOLDER gets what it writes.
#   bash tests/tiles_gpu.sh FOLDER
set -uo pipefail
to=${1:?where to}
mkdir -p "$to"
failed=0
GSP_REQUIRE=gpu python -m pytest -q -m gpu tests/test_tiles.py tests/test_pcsr.py tests/test_errors.py \
  tests/test_compile.py 2>&1 | tee "$to/tests.txt" | tail -3 || failed=1
python tests/sanitizers.py --jobs 8 --widths 33 256 --no-coverage 2>&1 | tee "$to/sanitizers.txt" | tail -8 || failed=1
# How long tiles take to make, in products (30 are asked for).
python - <<'PY' 2>&1 | tee "$to/build.txt" || failed=1
import torch
import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import tiles
from gnn_spmm_plugin.bench.graphs import named

def milliseconds(call, times):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times

for name in ("ddi_like", "proteins_like", "redditlike_sorted", "ra_dense_small_d90"):
    made = named(name, "cuda")
    g = gsp.Graph.from_csr(made.rowptr, made.col, made.num_nodes)
    x = torch.randn(made.num_nodes, 128, device="cuda", dtype=torch.bfloat16)
    plan = gsp.plan(g, 128, torch.bfloat16, kernel="tile")
    product = milliseconds(lambda: gsp.spmm(g, x, plan=plan), 20)
    ours = milliseconds(lambda: gsp.spmm(g, x), 20)
    packing = milliseconds(lambda: tiles.build(tiles.pack(g._csr, plan.format.config.height), plan.format.config), 3)
    print(f"{name}: tiles made in {packing:.2f} ms, {packing / product:.1f} products of {product:.4f} ms (default {ours:.4f})")
    print(plan.explain())
PY
python -m gnn_spmm_plugin bench --suite tiles --budget 20 --csv "$to/tiles_h200.csv" 2>&1 | tail -60 || failed=1
exit $failed
