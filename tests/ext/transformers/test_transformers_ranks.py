"""Decoders of transformers in an active sequence: logits, loss and gradients, joined over ranks, equal one rank."""

import re
from itertools import pairwise

import pytest
import torch

import lightning_dilated as ld

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")

from ...distributed.calls import positions, sequence
from .decoders import FAMILIES, close, decoder, step, tokens

N = 23
BOUNDS = [0, 9, 10, N]
#: arguments of `decoder`
MODELS = {
    **{name: (name, {}) for name in FAMILIES},
    "hybrid": ("llama", {"pattern": {"hybrid": {"local": 4, "global_every": 2}}}),
    "dilated": ("gemma3", {"pattern": [ld.DilatedPattern.longnet([4, 16], [1, 2]), ld.DilatedPattern([ld.Window(6)])]}),
    "longnet": ("qwen3", {"pattern": ld.DilatedPattern.longnet([8, 32], [1, 2])}),
    "dropout": ("llama", {"attention_dropout": 0.5}),
}
KINDS = ("whole", "packed", "cu_seq_lens", "padded", "rows")


def data(kind):
    """Return (tokens, labels, options by token, other options) of a batch. Options (B, N) are split among ranks."""
    if kind == "even":
        return tokens(1, 32), tokens(1, 32), {"position_ids": torch.arange(32)[None]}, {"use_cache": False}
    if kind == "padded":
        inputs, lengths = tokens(2, N), torch.tensor([[N - 9], [N]])
        mask = (torch.arange(N) < lengths).long()
        cut = {"attention_mask": mask, "position_ids": torch.arange(N).expand(2, -1)}
        return inputs, inputs.masked_fill(mask == 0, -100), cut, {}
    rows = 2 if kind == "rows" else 1
    inputs, at = tokens(rows, N), torch.arange(N).expand(rows, -1)
    if kind not in ("whole", "rows"):
        at = torch.cat([torch.arange(b - a) for a, b in pairwise(BOUNDS)])[None]
    whole = {"cu_seq_lens_q": torch.tensor(BOUNDS, dtype=torch.int32)} if kind == "cu_seq_lens" else {}
    return inputs, inputs, {"position_ids": at}, {"use_cache": False, **whole}


def part(rank, group, name, kind, settings):
    """Return the results of `step` on one rank."""
    family, options = MODELS[name]
    inputs, labels, cut, whole = data(kind)
    with sequence(group, **settings) as ours, ours.active():
        at = positions(ours, inputs.shape[1])
        model = decoder(family, **options).train()
        cut = {key: value[:, at] for key, value in cut.items()}
        torch.manual_seed(1)
        return step(model, inputs[:, at], labels[:, at], **cut, **whole)


def check(pools, ranks, name, kind, **settings):
    family, options = MODELS[name]
    inputs, labels, cut, whole = data(kind)
    model = decoder(family, "sdpa" if not options else "ring_dilated", **options).train()
    torch.manual_seed(1)
    want = step(model, inputs, labels, **cut, **whole)
    parts = pools(ranks).run(ranks, part, name, kind, settings)
    got = {key: sum(p[key] for p in parts) for key in want if key != "logits"}
    if settings.get("layout", "contiguous") == "contiguous" and kind not in (
        "padded",
        "rows",
    ):  # with other kinds, logits are in another order
        got["logits"] = torch.cat([p["logits"] for p in parts])
    else:
        del want["logits"]
    close(got, want, 1e-10)


@pytest.mark.parametrize("ranks", [*(pytest.param(r, marks=pytest.mark.slow) for r in (1, 2, 4)), 3])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_equal_one(pools, name, ranks):
    check(pools, ranks, name, "whole")


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "hybrid", "dropout"])
def test_documents_and_padding(pools, name, kind):
    check(pools, 3, name, kind)


@pytest.mark.parametrize("settings", [{"layout": "zigzag"}, {"exchange": "ring"}, {"head_size": 2}], ids=str)
def test_dropout_in_layouts_and_exchanges(pools, settings):
    check(pools, 2, "dropout", "whole", **settings)


def test_dropout_drops():
    """Dropout changes the loss, so the tests above are not trivial."""
    family, options = MODELS["dropout"]
    model = decoder(family, **options)
    torch.manual_seed(1)
    losses = [float(step(model.train(training), tokens(1, N))["loss"]) for training in (True, True, False)]
    assert len(set(losses)) == 3


SETTINGS = {
    "zigzag": {"layout": "zigzag"},
    "ring": {"exchange": "ring"},
    "switch": {"exchange": "switch"},
    "gather": {"exchange": "gather"},
    "head 2": {"head_size": 2},
}
#: cases in CI, with each setting and each kind; other pairs run with `-m slow`
CI = {("zigzag", "packed"), ("zigzag", "padded"), ("ring", "rows"), ("switch", "padded"), ("gather", "packed")}
CI |= {("head 2", "whole"), ("head 2", "rows")}


@pytest.mark.parametrize(
    "name, kind",
    [
        pytest.param(name, kind, marks=[] if (name, kind) in CI else pytest.mark.slow)
        for name in SETTINGS
        for kind in ("whole", "packed", "padded", "rows")
    ],
)
def test_layouts_and_exchanges(pools, name, kind):
    check(pools, 2, "gemma3", kind, **SETTINGS[name])


#: exchange -> {model that it refuses: reason}
EXCHANGES = {
    "gather": {},
    "ring": {},
    "switch": {},
    "butterfly": {
        "mistral": r"needs segments, and branches\[0\] is Window\(5\)",
        "hybrid": "needs branches without a shift",
    },
}


@pytest.mark.parametrize("name", ["llama", "mistral", "hybrid", "longnet"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_exchange_on_four_ranks(pools, exchange, name):
    """A butterfly supports only dense layers and equal shards."""
    if reason := EXCHANGES[exchange].get(name):
        for answer in pools(4).answers(4, part, name, "even", {"exchange": exchange}):
            assert answer.error == "ValueError" and re.search(f"exchange='butterfly' cannot.*{reason}", answer.message)
    else:
        check(pools, 4, name, "even", exchange=exchange)


LLAMA4 = {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 8, "intermediate_size_mlp": 32}
AT = torch.arange(N)[None]
REFUSALS = {
    "no positions": ("llama", {}, "count from 0 on every rank"),
    "left padding": ("llama", {"position_ids": AT, "attention_mask": (AT > 2).long()}, "padding on the left"),
    "holes": ("llama", {"position_ids": AT, "attention_mask": (AT != 12).long()}, "has holes"),
    "a mask of the whole": ("llama", {"position_ids": AT, "attention_mask": torch.ones(1, N + 9)}, "rank's own part"),
    "documents with a cache": ("llama", {"position_ids": AT % 9}, "use_cache=False"),
    "documents in rows": ("llama", {"position_ids": (AT % 9).expand(2, -1), "use_cache": False}, "batch of 2 rows"),
    "documents and a mask": (
        "llama", {"position_ids": AT % 9, "attention_mask": torch.ones(1, N)}, "Leave attention_mask out",
    ),
    "chunks": ("Llama4TextConfig", {"position_ids": AT, "use_cache": False}, "within chunks"),
    "documents that differ": (
        "llama", {"position_ids": AT % 9, "cu_seq_lens_q": torch.tensor([0, 7, N])}, r"\[9, 18\] and cu_seq_lens_q at \[7\]",
    ),
}  # fmt: skip


def refused(rank, group, name):
    """Run a forward with options that are refused. Options with N columns are split among ranks."""
    family, options, _ = REFUSALS[name]
    with sequence(group) as ours, ours.active():
        model = decoder(family) if family in FAMILIES else decoder(family, dtype=torch.float32, **LLAMA4)
        at = positions(ours, N)
        cut = {k: v[:, at] if getattr(v, "shape", ())[1:] == (N,) else v for k, v in options.items()}
        model(tokens(len(options.get("position_ids", AT)), N)[:, at], **cut)


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_reach_every_rank(pools, name):
    answers = pools(2).answers(2, refused, name)
    for answer in answers:
        assert answer.error == "ValueError", answer.trace
    assert any(re.search(REFUSALS[name][2], answer.message) for answer in answers), answers[0].message
