"""DDP does not split compiled blocks."""

import pytest
import torch
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.utils.data import DataLoader

import lightning_dilated as ld

from .runs import trainer

pytestmark = pytest.mark.full


class Compiled(ld.LongNetLM):
    """A model with blocks compiled by a backend that records graphs instead of generating code."""

    def __init__(self, graphs):
        super().__init__(ld.DilatedPattern.dense(), dim=256, depth=2, num_heads=4, compile_blocks=False)
        self.graphs = graphs

    def configure_model(self):
        existed = hasattr(self, "transformer")
        super().configure_model()
        for block in () if existed else self.transformer.blocks:
            block.compile(fullgraph=True, backend=self.note)

    def note(self, graph, inputs):
        self.graphs.append(graph)
        return graph


def train(strategy, memory):
    torch._dynamo.reset()
    graphs = []
    sample = {name: torch.zeros(16, dtype=torch.int64) for name in ("tokens", "labels")}
    run = trainer(strategy, 1, max_steps=2, callbacks=memory)
    run.fit(Compiled(graphs), DataLoader([sample, sample]), DataLoader([sample]))
    return len(graphs)


@pytest.mark.parametrize("settings", [None, {"policy": "block", "tile": 8, "head_chunks": 4}])
def test_blocks_stay_whole(settings, monkeypatch):
    """A block has more parameters than DDP's first bucket, where torch.compile would split its graph."""
    calls = []
    monkeypatch.setattr(DDPOptimizer, "compile_fn", lambda self, graph, inputs: calls.append(graph) or graph)
    memory = lambda: [ld.callbacks.ActivationRecompute(**settings)] if settings else []  # noqa: E731
    alone = train("auto", memory())
    assert train(ld.RingDilatedStrategy(), memory()) == alone > 0
    assert not calls
    assert torch._dynamo.config.optimize_ddp
