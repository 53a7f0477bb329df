"""LongNetLM: causal, exact with padding and packing, a correct loss, and completely restored from a checkpoint."""

import math
from collections import OrderedDict
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_dilated import DilatedPattern, LongNetLM

from . import PATTERN, SIZES, batch, loader, tiny, trainer

PATTERNS = {
    "longnet": PATTERN,
    "shifted": PATTERN.shifted(),
    "whole sequence": DilatedPattern([(4, 1), (None, 3)]),
    "blocked": DilatedPattern.longnet([4, 16], [1, 3], offsets="blocked"),
    "shifted layers": PATTERN,
}
OPTIONS = {"shifted layers": {"shift_layers": "odd"}}


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def same(got, want, tol=1e-6):
    """Assert equality up to the precision of a loss in fp32."""
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


# -- what a token sees -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("options", [{}, {"position_encoding": "xpos", "num_kv_heads": 2}], ids=["rotary", "xpos, gqa"])
def test_no_token_sees_a_later_one(name, options):
    model, tokens = tiny(PATTERNS[name], **options, **OPTIONS.get(name, {})), torch.randint(10, (1, 40))
    want = model(tokens)
    for t in range(0, 40, 3):
        changed = tokens.clone()
        changed[0, t] = 10
        got = model(changed)
        assert torch.equal(got[:, :t], want[:, :t]) and not torch.equal(got[:, t], want[:, t])


@pytest.mark.parametrize("name", PATTERNS)
def test_padded_batch_equals_single_samples(name):
    model, lengths = tiny(PATTERNS[name], **OPTIONS.get(name, {})), [40, 23, 1]
    data = batch(3, 40)
    data["labels"][torch.arange(40) >= torch.tensor(lengths)[:, None]] = -100
    total, tokens = model.loss_terms({**data, "lengths": torch.tensor(lengths)})
    singles = [
        model.loss_terms({k: v[i : i + 1, :n] for k, v in data.items()})[0] for i, n in enumerate(lengths)
    ]  # fmt: skip
    assert tokens == sum(lengths)
    same(total, sum(singles))
    for a, b in zip(gradients(model, total), gradients(model, sum(singles)), strict=True):
        same(a, b)


@pytest.mark.parametrize("num_kv_heads", [None, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("position_encoding", ["none", "rotary", "xpos"])
@pytest.mark.parametrize("name", PATTERNS)
def test_packed_documents_equal_separate_ones(name, position_encoding, num_kv_heads):
    """Rotary and xPos depend only on distances, so a document may be anywhere in a pack."""
    model = tiny(
        PATTERNS[name], position_encoding=position_encoding, num_kv_heads=num_kv_heads, **OPTIONS.get(name, {})
    )
    data, bounds = batch(1, 40), [0, 17, 18, 40]
    packed = {**data, "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    parts = [{k: v[:, a:b] for k, v in data.items()} for a, b in pairwise(bounds)]
    same(model.token_losses(packed), torch.cat([model.token_losses(p) for p in parts], 1))
    total, singles = model.loss_terms(packed)[0], sum(model.loss_terms(p)[0] for p in parts)
    for a, b in zip(gradients(model, total), gradients(model, singles), strict=True):
        same(a, b)


def test_shifted_layers_carry_over_the_wall():
    """Tokens 0..15 affect a prediction beyond the segment end at 16 only if odd layers are shifted."""
    tokens = torch.randint(10, (1, 32))
    changed = tokens.clone()
    changed[0, 15] = 10
    for options, differs in (
        ({}, False),
        ({"shift_layers": "odd"}, True),
        ({"shift_layers": "odd", "depth": 1}, False),
    ):
        model = tiny(**options)
        assert torch.equal(model(tokens)[:, 16:], model(changed)[:, 16:]) != differs


# -- the loss ----------------------------------------------------------------------------------------------------------
def test_labels_of_minus_100_are_left_out():
    model, data = tiny(), batch(2, 20)
    want = model.token_losses(data)
    hidden = torch.rand(2, 20) < 0.4
    data["labels"] = data["labels"].masked_fill(hidden, -100)
    same(model.token_losses(data), want.masked_fill(hidden, 0))
    total, tokens = model.loss_terms(data)
    same(total, want[~hidden].sum())
    assert tokens == (~hidden).sum()


def test_training_step_is_cross_entropy():
    model, data = tiny().train(), batch(2, 20)
    data["labels"][0, :7] = -100
    want = nn.functional.cross_entropy(model(data["tokens"]).flatten(0, 1), data["labels"].flatten())
    got = model.training_step(data, 0)
    same(got.double(), want)
    for a, b in zip(gradients(model, got), gradients(model, want), strict=True):
        same(a, b)


def test_loss_of_half_precision_logits_is_fp32():
    model = tiny(dtype=torch.bfloat16)
    assert model.token_losses(batch(2, 20)).dtype == torch.float32


def test_derived_metrics():
    got = tiny(bytes_per_token=4.0).derived_metrics(torch.tensor(2.0))
    assert got["bits_per_byte"].item() == pytest.approx(2 / math.log(2) / 4)
    assert got["perplexity"].item() == pytest.approx(math.exp(2))


def test_lightning_leaves_document_bounds_on_the_cpu():
    """Lightning would move every tensor of a batch, but the op reads cu_seqlens on the CPU only."""
    data = OrderedDict(cu_seqlens=torch.tensor([0, 5, 20], dtype=torch.int32), **batch(1, 20))
    data["lengths"] = mock.Mock(spec=["to"])
    moved = tiny().transfer_batch_to_device(data, torch.device("meta"), 0)
    assert type(moved) is OrderedDict and list(moved) == list(data)
    assert moved["tokens"].device.type == "meta" and moved["cu_seqlens"] is data["cu_seqlens"]
    assert moved["lengths"] is data["lengths"] and not data["lengths"].to.called  # not moved, even temporarily


def test_predict_step():
    model, data = tiny(bytes_per_token=2.0), batch(3, 20)
    data["labels"][1, 5:], data["labels"][2] = -100, -100
    got = model.predict_step({**data, "index": torch.tensor([4, 9, 2])}, 0)
    assert got["tokens"].tolist() == [20, 5, 0] and got["index"].tolist() == [4, 9, 2]
    alone = [model.loss_terms({k: v[i : i + 1] for k, v in data.items()})[0].item() for i in range(3)]
    # a sample without predictions has nan, not 0 bits
    want = [alone[0] / 20 / math.log(4), alone[1] / 5 / math.log(4), math.nan]
    assert got["bits_per_byte"].tolist() == pytest.approx(want, nan_ok=True)
    assert "index" not in model.predict_step(data, 0)


# -- its parameters ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tied_embeddings_share(tied):
    model = tiny(tie_embeddings=tied)
    assert (model.head.weight is model.embedding.weight) == tied
    assert len(list(model.parameters())) == len(list(tiny().parameters())) + (not tied)
    model.loss_terms(batch(2, 20))[0].backward()
    assert (model.embedding.weight.grad is model.head.weight.grad) == tied


def test_learns_one_sequence_by_heart():
    torch.manual_seed(0)
    model, data = tiny(dtype=torch.float32, tie_embeddings=False).train(), batch(1, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        losses.append(model.training_step(data, 0))
        optimizer.zero_grad(), losses[-1].backward(), optimizer.step()
    assert losses[-1] < losses[0] / 4


def test_compiled_blocks_train_as_eager_ones():
    model, data = tiny(DilatedPattern.geometric(4, 16)), batch(2, 20)
    want = gradients(model, model.loss_terms(data)[0])
    for block in model.transformer.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(model, model.loss_terms(data)[0]), want, strict=True):
        same(a, b)


@pytest.mark.parametrize(
    "options, backend",
    [
        ({"depth": 1}, None),
        ({}, "aot_eager"),
        ({"position_encoding": "xpos"}, "aot_eager"),
        ({"pattern": {"hybrid": {"local": 5, "global_every": 2}}, "global_rotary": False}, "aot_eager"),
    ],
    ids=["Inductor", "rotary", "xpos", "dense heads without positions"],
)
@pytest.mark.full
def test_compile_blocks(options, backend):
    """A compiled model trains and generates like a plain one. The option changes no name and is not saved."""
    with torch.compiler.set_stance("default", force_backend=backend):
        check_compiled(options, 6 if backend else 2)  # Inductor takes seconds to compile each new shape


def check_compiled(options, new_tokens):
    """Check that a compiled model has the gradients, generated tokens and names of the plain model."""
    plain, compiled = tiny(dtype=torch.float32, **options), tiny(dtype=torch.float32, compile_blocks=True, **options)
    compiled.load_state_dict(plain.state_dict())
    data = batch(2, 20)
    for a, b in zip(
        gradients(compiled, compiled.loss_terms(data)[0]), gradients(plain, plain.loss_terms(data)[0]), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    prompt = data["tokens"][:, :5]
    assert torch.equal(
        compiled.eval().generate(prompt, new_tokens, temperature=0),
        plain.eval().generate(prompt, new_tokens, temperature=0),
    )
    assert "compile_blocks" not in compiled.hparams and list(compiled.state_dict()) == list(plain.state_dict())


# -- checkpoints -------------------------------------------------------------------------------------------------------
class Wide(LongNetLM):
    """A user's subclass with its own argument names in the constructor."""

    def __init__(self, width: int = 4, segments: tuple = (4, 16)) -> None:
        pattern = DilatedPattern.longnet(list(segments), [1, 2])
        super().__init__(pattern, vocab_size=11, dim=4 * width, depth=1, num_heads=4)


class Fixed(LongNetLM):
    """A subclass that sets the pattern and forwards the other arguments."""

    def __init__(self, label: str = "", **options) -> None:
        super().__init__(PATTERN, **options)
        self.label = label


class Renamed(LongNetLM):
    """A subclass with a constructor that has a different name for the pattern."""

    def __init__(self, attention_pattern: DilatedPattern, dim: int = 16) -> None:
        super().__init__(attention_pattern, **{**SIZES, "dim": dim})


class Saver(LongNetLM):
    """A subclass that calls `save_hyperparameters`, as Lightning's documentation does in every module."""

    def __init__(self, pattern: DilatedPattern, extra: int = 1) -> None:
        super().__init__(pattern, **SIZES)
        self.save_hyperparameters()


MADE = {
    "LongNetLM, pattern": lambda: LongNetLM(PATTERN.shifted(), **SIZES, bias=True),
    "shifted layers": lambda: LongNetLM(PATTERN, **SIZES, shift_layers="odd", shift_below=16),
    "hybrid": lambda: LongNetLM({"hybrid": {"local": 5}}, **{**SIZES, "depth": 4}, max_seq_len=4096),
    "a list": lambda: LongNetLM([PATTERN, DilatedPattern.dense()], **{**SIZES, "depth": 3}, rotary_base=[1e4, "none"]),
    "LongNetLM, mapping": lambda: LongNetLM({"segment_lengths": [4, 16], "dilation_rates": [1, 2]}, **SIZES),
    "with an optimizer": lambda: LongNetLM(PATTERN, **SIZES, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
    "subclass of other words": lambda: Wide(width=8),
    "subclass with a fixed pattern": lambda: Fixed("mine", **SIZES, norm="layernorm"),
    "subclass with another name for it": lambda: Renamed(PATTERN.shifted()),
    "subclass that saves by itself": lambda: Saver(PATTERN, extra=2),
}


@pytest.mark.parametrize("name", MADE)
def test_checkpoint_gives_the_model_back(name, tmp_path):
    model, data = MADE[name](), batch(2, 20)
    run = trainer(max_steps=1)
    run.fit(model, loader(data))
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert plain(torch.load(tmp_path / "x.ckpt", weights_only=True)["hyper_parameters"])
    twin = type(model).load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert twin.pattern == model.pattern and twin.options == model.options
    assert torch.equal(twin.eval()(data["tokens"]), model.eval()(data["tokens"]))


def plain(value):
    if isinstance(value, dict):
        return all(isinstance(k, str) and plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    return value is None or type(value) in (bool, int, float, str)
