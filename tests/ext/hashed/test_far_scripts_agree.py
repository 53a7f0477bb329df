"""hashed_attention equals the code of the experiments that showed that codes learn (benchmarks/far/codes.py)."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from .cases import Case

PATH = Path(__file__).parents[3] / "benchmarks" / "far" / "codes.py"


@pytest.fixture(scope="module")
def codes():
    spec = importlib.util.spec_from_file_location("far_codes", PATH)
    module = sys.modules["far_codes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["far_codes"]


@pytest.mark.parametrize("change", [{}, {"probes": 3}, {"soft": True}, {"soft": True, "code_scores": False}], ids=str)
def test_output_and_losses(codes, change):
    case = Case((80, 80), group=1, dim=8, groups=3, codes=3, latest=6, **change)
    q, k, v, z_q, z_k = (x.detach()[:, :, 0] for x in case.tensors()[:5])
    (null,) = case.tensors()[5].detach()
    query, packed = (torch.cat([*x, z.softmax(-1).flatten(2)], -1) for x, z in (((q,), z_q), ((k, v), z_k)))
    if case.soft:
        read = codes.soft(query, packed, 8, 3, not case.code_scores).shaped(1, 2, 80)
    else:
        sample, position = torch.arange(2)[:, None] * 27, torch.arange(80).repeat(2)
        rows = codes.Rows((codes.numbers(z_k) + sample).flatten(), position, packed.flatten(0, 1))
        lookups, code = query.flatten(0, 1).repeat(case.probes, 1), (codes.probed(z_q, case.probes) + sample).flatten()
        read = codes.exact(lookups, code, position.repeat(case.probes), rows, 6, 8, 3).shaped(case.probes, 2, 80)
    out, agree, contrast = codes.mix(read, null)
    want = {"out": out, "agree": agree, "contrast": contrast, "rows": read.count.sum(0)}
    for name, z in (("balance", z_k), ("spread", z_q)):
        want[name] = torch.stack([codes.balance(x[None].softmax(-1)) for x in z])
    got = case.run()
    for name, x in want.items():
        torch.testing.assert_close(
            got[name].reshape(x.shape), x.double(), rtol=0, atol=1e-5, msg=lambda t, name=name: f"{name} {t}"
        )
