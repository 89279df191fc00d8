"""A long differential campaign: random graphs, numbers, plans and operators against float64 plain torch.

    python tests/campaign.py --minutes 15 --seed 1 [--device cpu|cuda] [--guard]

Prints the seed, the number of cases of each kind, and each wrong one with a line that repeats it; exits with 1 where
one is wrong. ``--guard`` (Linux) runs under glibc's allocator checks: every block of memory is filled before use and
has a sentinel byte behind it. On CUDA, outputs have sentinels of their own (see `campaign_draw.sentinels`).
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's flag asks for it, on CUDA

import torch
from campaign_cases import KINDS
from campaign_draw import Draw

import gnn_spmm_plugin as gsp

_GUARD = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "171"}
#: Cases of one seed.
CASES = 10**8


def run_case(case: int, device: str) -> tuple[str, str | None, list[str]]:
    """(kind, what is wrong or None, what was drawn) of one case."""
    d = Draw(case, device)
    kinds = [name for name, (times, _) in KINDS.items() for _ in range(times)]
    kind = d.choice(kinds)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(d.choice((1, 1, 1, 2, 3)))
        torch.use_deterministic_algorithms(d.one_in(6))  # fills outputs with NaN first, too
        KINDS[kind][1](d)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return kind, f"{type(error).__name__} at {where}: {error}", d.drawn
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    return kind, None, d.drawn


def run(
    seed: int, device: str, minutes: float = 1e9, cases: int = CASES, most_wrong: int = 20
) -> tuple[dict[str, int], int]:
    """Cases of each kind that ran, and how many were wrong; these are printed."""
    counts: collections.Counter[str] = collections.Counter()
    wrong, end = 0, time.monotonic() + 60 * minutes
    for case in range(seed * CASES, seed * CASES + cases):
        if time.monotonic() > end or wrong >= most_wrong:
            break
        kind, what, drawn = run_case(case, device)
        counts[kind] += 1
        if what is not None:
            wrong += 1
            print(f"WRONG  {kind}: {what}\n       {', '.join(drawn)}")
            print(f"       python tests/campaign.py --device {device} --case {case}", flush=True)
    return dict(counts), wrong


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", type=int, help="run this one alone, and raise what it raises")
    parser.add_argument("--guard", action="store_true", help="under glibc's allocator checks")
    args = parser.parse_args()
    if args.guard and "MALLOC_CHECK_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_GUARD})
    if args.case is not None:
        kind, what, drawn = run_case(args.case, args.device)
        print(kind, ", ".join(drawn), what or "right", sep="\n")
        return int(what is not None)
    start = time.monotonic()
    counts, wrong = run(args.seed, args.device, args.minutes)
    took = (time.monotonic() - start) / 60
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"seed {args.seed} on {name}, {took:.1f} minutes, torch {torch.__version__}, gsp {gsp.__version__}")
    for kind, count in sorted(counts.items()):
        print(f"  {kind:20} {count:8}")
    print(f"  {sum(counts.values())} cases, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
