"""MemoryProfiler on two ranks: maximum and minimum over ranks, and the buffers of attention's exchange."""

import lightning.pytorch as pl
import pytest

from lightning_dilated.callbacks import ActivationRecompute
from lightning_dilated.ext.planning.counting.memory_tracker import ACTIVATIONS, EXCHANGE, GRADIENTS
from lightning_dilated.ext.profiling.memory.phases import BACKWARD, FORWARD, OPTIMIZING, Phase
from lightning_dilated.ext.profiling.memory.profiler import MemoryProfiler

from ...models import loader
from ...strategy.runs import Run, launched, make, trainer
from .stacks import SCALARS, Kept, Stack, batches

pytestmark = pytest.mark.full


def unlike(rank, group, folder):
    """Fit two blocks under DDP. Rank 1 has three times the rows."""
    profiler, logger = MemoryProfiler(1, folder=f"{folder}/{rank}"), Kept()
    built = trainer(
        "ddp", launched(rank), max_steps=2, callbacks=[profiler], logger=logger, use_distributed_sampler=False
    )
    built.fit(Stack(), loader(*batches(8, 4 * (1 + 2 * rank))))
    return profiler.measured.spans, profiler.rows, profiler.top, logger.steps, profiler.latest, profiler.peak_allocated


def test_unlike_ranks(pool, tmp_path):
    results = pool.run(2, unlike, str(tmp_path))
    (first, rows, top, steps, latest, _), (second, *_) = results
    assert results[1][1:5] == (rows, top, steps, latest) and list(steps) == [0, 1] and steps[1] == latest
    # a row of an activation has 32 bytes: rank 1 has 8 more rows in the batch, two saved activations, one in the block
    spans = [next(x for x in spans if x.phase == Phase(FORWARD, 1)) for spans in (first, second)]
    sizes = [x.allocated for x in spans]
    # the time when gloo frees DDP's first buckets varies
    own = [x.allocated - x.kinds[EXCHANGE] for x in spans]
    assert own[1] - own[0] == 8 * 32 * 4 and sizes == [results[0][5], results[1][5]]
    assert (latest["memory/forward_block_2_mb"], latest["memory/forward_block_2_min_mb"]) == (
        sizes[1] / 1e6,
        sizes[0] / 1e6,
    )
    assert (latest["memory/peak_mb"], latest["memory/peak_min_mb"]) == (sizes[1] / 1e6, sizes[0] / 1e6)
    row = next(x for x in rows if x.phase == Phase(FORWARD, 1))
    assert (row.allocated, row.rank, row.least, row.reserved) == (sizes[1], 1, sizes[0], None)
    assert (top.allocated, top.rank, top.phase) == (sizes[1], 1, Phase(FORWARD, 1))
    assert latest["memory/at_peak/saved_activations_mb"] == 2 * 12 * 32 / 1e6  # numbers of rank 1
    assert latest["memory/host_mb"] >= latest["memory/host_min_mb"] > 10
    # the rank with the highest peak draws the picture
    assert not (tmp_path / "0").exists() and (tmp_path / "1" / "memory_timeline.png").exists()


class Bytes(pl.Callback):
    """Records the bytes that attention's exchange received in the last step, in the forward and in the backward."""

    def on_train_batch_start(self, trainer, *args):
        self.group = trainer.strategy.sequence
        self.group.forward_traffic.clear(), self.group.backward_traffic.clear()

    def on_before_backward(self, *args):
        self.forward = self.group.forward_traffic.received


def exchanges(rank, group, run, policy):
    """Run a LongNet on two ranks. Return (spans, bytes received in the forward, last log)."""
    profiler, counted = MemoryProfiler(1, timeline=False), Bytes()
    built, model, data, _ = make(run, launched(rank), callbacks=[profiler, counted, ActivationRecompute(policy)])
    built.fit(model, data)
    return profiler.measured.spans, counted.forward, profiler.latest


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("exchange, policy", [("gather", "none"), ("gather", "block"), ("ring", "none")])
def test_exchange_buffers(pool, exchange, policy, steps):
    """Received rows are stored until the backward, except by the ring and with recomputation.

    The first rank of a causal model receives none. DDP creates its final buckets in the second forward.
    """
    run = Run(steps=steps, strategy={"exchange": exchange})
    for rank, (spans, received, _) in enumerate(pool.run(2, exchanges, run, policy)):
        assert (received > 0) == (rank > 0)
        if rank and policy == "none":
            assert all(x.kinds[EXCHANGE] > SCALARS for x in spans if x.phase.block is not None)
        last = [x for x in spans if x.phase == Phase(FORWARD)][-1]
        saved = received if (exchange, policy) == ("gather", "none") else 0
        buckets = (
            last.kinds[EXCHANGE] - saved
        )  # size of the gradients, or twice that while gloo has not freed the first buckets
        assert buckets >= last.kinds[GRADIENTS] and buckets % last.kinds[GRADIENTS] < 2 * SCALARS
        assert last.kinds[ACTIVATIONS] > 0


def test_sharded_parameters(pool):
    """With FSDP, sharded parameters count as parameters, and gathered parameters as exchange."""
    for spans, *_ in pool.run(2, exchanges, Run(steps=2, fsdp=True, double=True), "none"):
        by_phase = {x.phase: x for x in spans}
        assert by_phase[Phase(BACKWARD, 0)].kinds[EXCHANGE] > 0 and by_phase[Phase(OPTIMIZING)].kinds[GRADIENTS] > 0
