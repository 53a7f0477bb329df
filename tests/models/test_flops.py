"""The FLOPs of a step equal the count of torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_dilated import Branch, DilatedPattern
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.transformer import step_flops

from . import batch, tiny


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 2, "ffn": "gelu", "shift_layers": "odd"},
        {"tie_embeddings": False},
        {"recurrence": [{"conv": 0}, None]},
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_counted(options, training):
    model, data = tiny(dtype=torch.float32, **options), batch(2, 23)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
        losses = model.token_losses(data)
        if training:
            losses.sum().backward()
    assert step_flops(model, 46, [23, 23], training) == counter.get_total_flops()


@pytest.mark.parametrize(
    "trained", ["head", "transformer.blocks.1", "transformer.blocks.1.ffn", "transformer.blocks.0.attention"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_frozen(trained, tied):
    """Frozen parameters get no gradient, and layers before the first trained one compute no input gradient."""
    model, data = tiny(dtype=torch.float32, tie_embeddings=tied), batch(2, 23)
    model.requires_grad_(False).get_submodule(trained).requires_grad_(True)
    with FlopCounterMode(display=False) as counter:
        model.token_losses(data).sum().backward()
    assert step_flops(model, 46, [23, 23]) == counter.get_total_flops()


def test_documents_and_windows_of_heads():
    pattern = DilatedPattern([Branch(4, 1, heads=[0]), (16, 2)])  # unequal numbers of pairs in the two chunks of heads
    model, data = tiny(pattern, dtype=torch.float32), batch(1, 23)
    data["cu_seqlens"] = torch.tensor([0, 5, 5, 23], dtype=torch.int32)
    want = step_flops(model, 23, [5, 0, 18])
    assert want < step_flops(model, 23, [23])
    for chunks, again in ((1, 0), (2, 1)):
        model.transformer.memory = MemorySettings(head_chunks=chunks)
        with FlopCounterMode(display=False) as counter:
            model.token_losses(data).sum().backward()
        projections = 2 * sum(b.attention.in_proj_weight.numel() for b in model.transformer.blocks) * 23
        assert counter.get_total_flops() == want + again * projections  # the recomputation projects q, k and v again


def carried_pairs(pattern, heads, documents):
    """Count (query, key) pairs in which the key is in an earlier part of the document, by the pattern's definition."""
    counts = [(part, pattern.counts(part.stop, heads, True)) for part in documents]
    return sum(int(x[:, part.start :, : part.start].sum()) for part, x in counts)


@pytest.mark.parametrize("chunk", [None, 6])
@pytest.mark.parametrize("training", [True, False])
def test_streams(training, chunk):
    """Keys of earlier steps count in the forward and in the query's gradient, but they get no gradient themselves."""
    pattern = DilatedPattern([(8, 1), (64, 2)])
    model = tiny(pattern, dtype=torch.float32).train(training)
    model.transformer.memory = MemorySettings(stream=chunk)
    starts = torch.zeros(2, 60, dtype=torch.bool)
    starts[:, 0] = starts[1, 25] = True
    text, most = torch.randint(0, 11, (2, 61)), 0
    want = {  # one list per step: documents of stream 0, then of stream 1
        None: [[(0, 20), (0, 20)], [(20, 40), (20, 25), (0, 15)], [(40, 60), (15, 35)]],
        6: [
            [(0, 6), (6, 12), (12, 18), (18, 20)] * 2,
            [(20, 26), (26, 32), (32, 38), (38, 40), (20, 25), (0, 1), (1, 7), (7, 13), (13, 15)],
            [(40, 46), (46, 52), (52, 58), (58, 60), (15, 21), (21, 27), (27, 33), (33, 35)],
        ],
    }[chunk]
    for step, at in enumerate(range(0, 60, 20)):
        data = {
            "tokens": text[:, at : at + 20], "labels": text[:, at + 1 : at + 21], "starts": starts[:, at : at + 20],
            "stream": torch.arange(2), "position": torch.tensor([at, at]),
        }  # fmt: skip
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
            total, _ = model.loss_terms(data)
            if training:
                total.backward()
        parts = model.truncated_parts(data)
        assert parts == [range(*x) for x in want[step]]
        carried = len(model.transformer.blocks) * 4 * carried_pairs(pattern, model.num_heads, parts)
        most = max(most, carried)
        head_dim = model.dim // model.num_heads
        assert step_flops(model, 40, parts, training) == counter.get_total_flops() - training * head_dim * carried
    assert most > 0 and model.truncated_parts(batch(2, 23)) is None


def test_truncated_chunks():
    """With truncation, no gradient crosses a chunk boundary, in documents and in padded samples."""
    model = tiny(DilatedPattern([(8, 1), (64, 2)]), dtype=torch.float32)
    packed = {**batch(1, 23), "cu_seqlens": torch.tensor([0, 5, 5, 23], dtype=torch.int32)}
    padded = {**batch(2, 23), "lengths": torch.tensor([4, 20])}
    model.transformer.memory = MemorySettings(stream=10, truncate=True)
    assert model.truncated_parts(packed) == [range(5), range(5), range(5, 15), range(15, 18)]
    assert model.truncated_parts(padded) == [range(4), range(10), range(10, 20)]
    assert model.truncated_parts(batch(1, 10)) is None
    model.transformer.memory = MemorySettings(stream=10)
    assert model.truncated_parts(packed) is None


def test_no_blocks():
    with pytest.raises(ValueError, match="Linear has no TransformerBlock"):
        step_flops(torch.nn.Linear(2, 2), 4, [4])
