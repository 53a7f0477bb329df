# ruff: noqa
"""Compare runs of the case "few codes" bit by bit, with one kernel's tile and warps changed (temporary).

python benchmarks/hashed_variants.py TOKENS SEEDS [KERNEL LOOKUPS ROWS WARPS]
"""

import sys
from dataclasses import replace
from unittest import mock

import torch

from lightning_dilated.ext.hashed import kernels
from tests.ext.hashed.cases import Case
from tests.ext.hashed.test_gpu import CALLS, by_kernels, computed, in_float64

options = kernels.Call.options
tokens, seeds = map(int, sys.argv[1:3])
kernel, *sizes = sys.argv[3:] or [None, 0, 0, 0]


def changed(self, name):
    lookups, rows, warps = map(int, sizes)
    return options(self, name) | ({"LOOKUPS": lookups, "ROWS": rows, "num_warps": warps} if name == kernel else {})


case = replace(CALLS["few codes"], documents=(tokens,), dtype=torch.float16)
tensors = Case.tensors
differ, nans, wrong = {}, {}, {}
with mock.patch.object(kernels.Call, "options", changed):
    for seed in range(seeds):
        with mock.patch.object(Case, "tensors", lambda self, seed=seed: tensors(self, seed)):
            got, again = (computed(case, by_kernels) for _ in range(2))
            want = computed(case, in_float64) if seed < 3 else got
        for name, x in got.items():
            differ[name] = max(differ.get(name, 0), int((x != again[name]).sum()))
            nans[name] = max(nans.get(name, 0), int(x.isnan().sum()))
            error = float((x - want[name]).abs().max() / want[name].abs().max().clamp_min(1e-9))
            wrong[name] = max(wrong.get(name, 0), error)
short = lambda numbers, least: {name: f"{x:.3g}" for name, x in numbers.items() if not x <= least}
print(
    " ".join(sys.argv[1:]), "unequal", short(differ, 0), "nan", short(nans, 0), "wrong", short(wrong, 4e-3), flush=True
)
