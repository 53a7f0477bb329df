"""AdamW with states of 8 bits, from torchao, of dealt parameters: on the host as beside them, and in a second start."""

import functools

import pytest
import torch
from torch._functorch import config as functorch_config

from .runs import Run, full, launched, make

optim = pytest.importorskip("torchao.optim", reason="needs the extra eightbit")

#: the 11 rows of the table of tokens do not divide evenly; half a table of 512 x 128 keeps states of 8 bits
MODEL = {"dim": 128, "depth": 1, "optimizer": functools.partial(optim.AdamW8bit, lr=3e-3)}
RUN = Run(fsdp=True, precision="32-true", steps=3, batch_size=2, clip=0.5, model=MODEL)


def fit(rank, group, run, cache):
    """(losses, parameters, kinds of states, where they are, whether the forward found torch's cache of graphs on)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        torch._dynamo.reset()  # as in a process that was just started
        built, model, data, record = make(run, launched(rank))
        step, seen = model.training_step, []
        model.training_step = lambda *x: seen.append(functorch_config.enable_autograd_cache) or step(*x)
        with functorch_config.patch(enable_autograd_cache=True):
            built.fit(model, data)
    states = [t for s in built.optimizers[0].state.values() for t in s.values()]
    kinds = {type(t.to_local() if hasattr(t, "to_local") else t).__name__ for t in states}
    parameters = [full(p).detach().clone() for p in model.parameters()]
    return record.losses, parameters, kinds, {t.device.type for t in states}, set(seen)


@pytest.mark.slow
def test_dealt_parameters(pools, tmp_path):
    """Bit by bit, with cpu_offload and without; the second start finds what the first compiled."""
    losses, want, *_ = pools(2).run(2, fit, RUN, str(tmp_path))[0]
    for run in (RUN, RUN.but(strategy={"cpu_offload": True})):
        for got, parameters, kinds, places, cached in pools(2).run(2, fit, run, str(tmp_path)):
            assert "OptimState8bit" in kinds and places == {"cpu"} and cached == {True}
            assert got == losses
            torch.testing.assert_close(parameters, want, rtol=0, atol=0)
