"""Hashed heads in streams, in endless sequences, and in prompts of several calls: equal to the whole sequence."""

import io
import itertools
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import lightning_dilated as ld
from lightning_dilated.ext.hashed.functional import HashedLosses
from lightning_dilated.ext.hashed.op import HASHED, LossTerms, encode
from lightning_dilated.ext.hashed.oracle import oracle
from lightning_dilated.ext.hashed.rows import HashedRows
from lightning_dilated.ext.streams.stream import Stream
from lightning_dilated.memory.settings import MemorySettings

from ...examples import examples
from ..streams.test_carried_streams import batch, fitted
from ..streams.test_endless import VOCABULARY, call, expected
from ..streams.test_streaming import PACKED, PADDED, SHORT_PACKED, lm, text
from .cases import NAMES, Case, cases, compare, weights

WEIGHTS = (0.3, 0.7, 2.0, 3.0)
HASHED_OPTIONS = {"groups": 2, "codes": 3, "latest": 4, "probes": 2, "soft_until": 0}
LOOKUPS = {"hashed": HASHED_OPTIONS}
SOFT = {"hashed": {**HASHED_OPTIONS, "soft_until": 64}}


# -- the op ------------------------------------------------------------------------------------------------------------
class Chunks:
    """The calls of a case in chunks of C tokens, with losses of the labelled queries; `group`: see `Stream.begin`."""

    def __init__(self, case, chunk, truncate=False, group=None, device="cpu"):
        self.case, self.terms, self.stream = case, LossTerms(WEIGHTS), Stream()
        labelled = torch.rand(case.batch, case.seq_len, generator=torch.Generator().manual_seed(9)) < 0.7
        self.labelled = labelled.to(device)
        self.stream.begin(case.seq_len, chunk, not truncate, group)
        self.positions = [p for i in range(self.stream.chunks) for p in self.stream.tokens(i)]
        scale = case.dim**-0.5 if case.scale is None else case.scale
        self.spec = encode(case.latest, case.probes, scale, case.soft, self.stream.name)
        words = case.settings()
        documents = (words.get(name) for name in ("lengths", "cu_seqlens"))
        self.documents = [x and torch.tensor(x, dtype=torch.int32, device=device) for x in documents]

    def attend(self, tensors, i):
        """Return the output of chunk i, and its tensors, with padding of NaN."""
        at = self.stream.tokens(i)
        leaves = [x[:, at.start : at.stop].detach().clone() for x in tensors[:5]]
        for sample, n in enumerate([] if self.documents[0] is None else self.documents[0].tolist()):
            for x in leaves:
                x[sample, max(0, n - at.start) :] = torch.nan
        leaves = [x.requires_grad_() for x in (*leaves, tensors[5].detach())]
        (layer,) = self.stream.layers(i, [None])
        return HASHED(*leaves, *self.documents, layer.place, self.terms.number, self.spec)[0], leaves

    def differentiate(self, tensors, i, grad):
        at = self.stream.tokens(i)
        out, leaves = self.attend(tensors, i)
        return out.detach(), torch.autograd.grad(out, leaves, grad[:, at.start : at.stop].to(out.dtype))

    def run(self, tensors, grad):
        """Return out and all gradients, of exact training."""
        self.terms.labelled, outs, grads = self.labelled[:, self.positions], {}, {}
        last = self.stream.chunks - 1
        with torch.no_grad():
            for i in range(last):
                outs[i], leaves = self.attend(tensors, i)
                for x in leaves[:5]:
                    x.fill_(torch.nan)  # later chunks can read carried rows only
        self.stream.descend()
        for i in range(last, -1, -1):
            out, grads[i] = self.differentiate(tensors, i, grad)
            assert i == last or torch.equal(out, outs[i]), "the two passes differ"
            outs[i] = out
        return self.joined(outs, grads)

    def joined(self, outs, grads):
        order = range(self.stream.chunks)
        d_tensors = [torch.cat([grads[i][n] for i in order], 1) for n in range(5)] + [sum(g[5] for g in grads.values())]
        results = {"out": torch.cat([outs[i] for i in order], 1)}
        return results | {f"d {name}": x.double() for name, x in zip(NAMES, d_tensors, strict=True)}


def by_definition(case, tensors, grad, labelled):
    """Return out and the gradients of its weighted sum and of the losses, by the oracle."""
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    out, losses = oracle(*leaves, **case.settings(), labelled=labelled)
    total = (out * grad).sum() + LossTerms(WEIGHTS).total(losses, labelled.sum(1))
    grads = torch.autograd.grad(total, leaves)
    return {"out": out.detach()} | {f"d {name}": x for name, x in zip(NAMES, grads, strict=True)}


def check_chunks(case, chunk, tol=1e-10, device="cpu"):
    case = replace(case, code_scores=not case.soft)
    tensors, chunks = case.tensors(), Chunks(case, chunk, device=device)
    grad = weights(tensors[0].shape, 0)
    got = chunks.run([x.detach().to(device) for x in tensors], grad.to(device))
    got = {name: x.double().cpu() for name, x in got.items()}
    want = by_definition(case, tensors, grad, chunks.labelled.cpu())
    # sums of bf16 for each chunk, which nearly cancel
    summed = {"d null": size_of_null(case, tensors, want, grad) / 4} if case.dtype == torch.bfloat16 else {}
    compare(got, want, tol, summed)
    return chunks


def size_of_null(case, tensors, want, grad):
    """Return the root of the sum of squares of the terms, one for each token, of the gradient of null."""
    q, k, v, *codes, null = (x.detach().double() for x in tensors)
    others, _ = oracle(q, k, torch.ones_like(v), *codes, null, **case.settings())  # null's value is 0, all others are 1
    terms = (1 - others[..., 0]) * (want["out"] * grad).sum(-1)
    return terms.square().sum((0, 1)).sqrt().max().item()


random_calls = given(cases(), st.integers(1, 12))


def equals_the_oracle(case, chunk):
    """Documents and padding, several kv heads, ties, soft lookups, chunks shorter and longer than documents."""
    assume(case.seq_len)
    check_chunks(case, chunk)


test_equals_the_oracle = settings(max_examples=examples(25))(random_calls(equals_the_oracle))
test_equals_the_oracle_often = pytest.mark.slow(settings(max_examples=examples(600))(random_calls(equals_the_oracle)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes(dtype):
    tol = {torch.float32: 2e-5}.get(dtype, 2e-2)
    for soft in (False, True):
        check_chunks(Case((40, 33), latest=3, group=1, kv_heads=2, dtype=dtype, soft=soft), 7, tol)


def test_all_codes_equal():
    """One code: a query reads the L latest rows, across chunks."""
    for latest in (1, 5, 100):
        check_chunks(Case((50,), codes=1, latest=latest), 8)


@pytest.mark.parametrize("latest", [1, 3])
def test_rows_are_bounded(latest):
    """A chunk carries at most the latest rows of each code; the store has the others, each once."""
    case = Case((120, 120), kv_heads=2, latest=latest)
    chunks = Chunks(case, 10)
    with torch.no_grad():
        sizes = []
        for i in range(12):
            chunks.attend(case.tensors(), i)
            sizes.append(len(chunks.stream.hashed_of(0).rows.keys))
        carry = chunks.stream.hashed_of(0)
        assert sizes[-1] <= 2 * 2 * 4 * latest < sizes[1] + 2 * 2 * 4 * latest
        replaced = sum(len(gone) for _, gone, _ in carry._replaced)
        assert replaced + sizes[-1] <= 2 * 2 * 110
        assert torch.equal(carry.after().keys.unique(return_counts=True)[1].max(), torch.tensor(latest))


def test_gradients_of_carried_rows_are_summed_in_fp32():
    """The last of 40 chunks adds 512 to the gradient of the first token's value, and each other chunk adds 1."""
    case = Case((40,), codes=1, group=1, dim=4, latest=40)
    tensors = [torch.zeros_like(x, dtype=torch.bfloat16) for x in case.tensors()]
    grad = torch.arange(2, 42).double().view(1, 40, 1, 1).repeat(1, 1, 1, 4)  # a token's share, with the null key
    grad[:, -1] *= 512
    chunks = Chunks(case, 1)
    chunks.labelled[:] = False
    dv = chunks.run(tensors, grad)["d v"]
    torch.testing.assert_close(dv[0, 0, 0], torch.full((4,), 552.0, dtype=torch.float64))


def test_truncated_gradients():
    """Without a store, earlier rows are constants, and each chunk has its own balance and spread."""
    case = Case((37, 37), latest=3, kv_heads=2, group=1)
    tensors, chunks = case.tensors(), Chunks(case, 8, truncate=True)
    grad, outs, grads, want = weights(tensors[0].shape, 0), {}, {}, {}
    chunks.terms.labelled = chunks.labelled
    for i in range(chunks.stream.chunks):
        at = slice(chunks.stream.tokens(i).start, chunks.stream.tokens(i).stop)
        outs[i], grads[i] = chunks.differentiate(tensors, i, grad)
        leaves = [x[:, at].detach().requires_grad_() for x in tensors[:5]] + [tensors[5].detach().requires_grad_()]
        rows = [torch.cat([x[:, : at.start].detach(), y], 1) for x, y in zip(tensors[:5], leaves[:5], strict=True)]
        labelled = chunks.labelled[:, : at.stop].clone()
        labelled[:, : at.start] = False
        words = {"latest": case.latest}
        out, losses = oracle(*rows, leaves[5], **words, labelled=labelled)
        _, own = oracle(*leaves, **words, labelled=labelled[:, at])
        losses = HashedLosses(losses.agree, losses.contrast, own.balance, own.spread, losses.rows)
        total = (out[:, at] * grad[:, at]).sum() + LossTerms(WEIGHTS).total(losses, labelled.sum(1))
        want[i] = torch.autograd.grad(total, leaves)
    got = chunks.joined(outs, grads)
    compare(got, {"out": got["out"]} | {k: x for k, x in chunks.joined(outs, want).items() if k != "out"})


def test_chunks_out_of_order_are_refused():
    case = Case((30,))
    chunks = Chunks(case, 5)
    chunks.attend(case.tensors(), 0)
    with pytest.raises(RuntimeError, match="cannot go from chunk 0 to chunk 2"):
        chunks.attend(case.tensors(), 2)


# -- models ------------------------------------------------------------------------------------------------------------
def step(model, batch, **memory):
    """Return the loss, and the gradients of a training step, with the losses of codes."""
    model.transformer.memory = MemorySettings(**memory)
    model.zero_grad()
    loss, _ = model.token_mean(batch)
    loss.backward()
    model.transformer.memory = MemorySettings()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


BOTH = {"kv_conv": 3, "recurrence": {"kind": "gated_delta"}}
CASES = {
    "plain": (LOOKUPS, {}, text(), 16),
    "chunks of one token": (LOOKUPS, {}, text(17), 1),
    "longer than the text": (LOOKUPS, {}, text(), 100),
    "padded, in some layers": (
        {"hashed": {**HASHED_OPTIONS, "layers": [1]}, "num_kv_heads": 2},
        {"policy": "block"},
        text(batch=2, **PADDED),
        10,
    ),
    "three heads": ({"hashed": {**HASHED_OPTIONS, "heads": 2, "probes": 1}, "num_heads": 3, "dim": 12}, {}, text(), 9),
    "packed": (LOOKUPS, {"policy": "attention-kept"}, text(**PACKED), 10),
    "a document begins with a chunk": (LOOKUPS | BOTH, {"policy": "block", "every": 2}, text(61, **SHORT_PACKED), 13),
    "soft": (SOFT, {}, text(61, batch=2), 16),
    "soft, packed": (SOFT | BOTH, {"policy": "block"}, text(**PACKED), 13),
    "offload": (LOOKUPS, {"policy": "block", "offload": 1.0}, text(), 16),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_one_pass(name):
    options, memory, batch, chunk = CASES[name]
    model = lm(**options).train()
    want, want_grads = step(model, batch)
    latest = [layer.terms.latest for layer in hashed_layers(model)]
    got, grads = step(model, batch, stream=chunk, **memory)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[key], rtol=1e-10, atol=1e-10, msg=key)
        assert "hashed" not in key or grad.abs().max() > 1e-4, key
    for layer, x in zip(hashed_layers(model), latest, strict=True):
        torch.testing.assert_close(layer.terms.latest, x, rtol=1e-12, atol=1e-12)


def hashed_layers(model):
    layers = (block.attention_layer.hashed for block in model.transformer.blocks)
    return [layer for layer in layers if layer is not None]


def test_only_training_steps_train_codes():
    """`loss_terms` outside of a step has no losses of codes, in streams and after a step of another length."""
    model, batch = lm(**LOOKUPS).train(), text(61)
    plain = {}
    for memory in ({}, {"stream": 16}):
        step(model, text(33, batch=2), **memory)
        model.transformer.memory = MemorySettings(**memory)
        model.zero_grad()
        model.loss_terms(batch)[0].backward()
        plain[len(memory)] = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.transformer.memory = MemorySettings()
    for key, grad in plain[1].items():
        torch.testing.assert_close(grad, plain[0][key], rtol=1e-10, atol=1e-10, msg=key)
    assert (step(model, batch)[1]["transformer.blocks.0.attention.hashed.key_code.weight"] != 0).any()


# -- endless sequences -------------------------------------------------------------------------------------------------
def test_calls_equal_truncated_chunks():
    """Training call by call gives the gradients of `truncate`, and each call trains the codes."""
    options = {**HASHED_OPTIONS, "soft_until": 100}  # an endless sequence never has soft lookups
    model, tokens = lm(hashed=options).train(), torch.randint(0, VOCABULARY, (3, 121))
    _, want = step(model, {"tokens": tokens[:, :120], "labels": tokens[:, 1:]}, stream=20, truncate=True)
    model.zero_grad()
    for at in range(0, 120, 40):
        model.transformer.memory = MemorySettings(stream=20)
        (model.token_mean(batch(at, 40, tokens=tokens))[0] / 3).backward()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[key], rtol=1e-10, atol=1e-10, msg=key)
    model.transformer.memory = MemorySettings()


def test_the_state_is_bounded_and_can_be_saved():
    options = {"hashed": {**HASHED_OPTIONS, "heads": 2}, "depth": 1}
    model = lm(**options).eval()
    tokens = torch.randint(0, VOCABULARY, (2, 400), generator=torch.Generator().manual_seed(0))
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[1, 260] = True
    with torch.no_grad():
        want, states = call(model, tokens, [100] * 4, starts)
        torch.testing.assert_close(want, expected(model, tokens, starts), rtol=1e-10, atol=1e-10)
        for state in states:
            assert all(len(x.keys) <= 2 * 2 * 9 * 4 for x in state.memories.values())
        rows = states[2].memories[-1]
        assert isinstance(rows, HashedRows) and (rows.of_samples() == 1).sum() <= 40 * 2  # of the new document
        file = io.BytesIO()
        torch.save(states[1].state_dict(), file)
        file.seek(0)
        state = ld.StreamState.of(torch.load(file, weights_only=True))
        assert state.nbytes == states[1].nbytes
        again, _ = model.stream(tokens[:, 200:], None, state, starts=starts[:, 200:], per_token=True)
        torch.testing.assert_close(again, want[:, 200:], rtol=1e-10, atol=1e-10)
        narrow = lm(**options).float().eval()
        near, _ = narrow.stream(tokens[:, 200:], None, state, starts=starts[:, 200:], per_token=True)
        assert (near - want[:, 200:]).abs().mean() < 1e-3
    with pytest.raises(ValueError, match=r"the state was left by a model of .*hashed="):
        lm(**LOOKUPS).eval().stream(tokens[:, 200:], None, state, per_token=True)


def test_a_run_resumes_within_an_epoch(tmp_path):
    """A resumed run has the losses and the weights of an uninterrupted run."""
    make = lambda: ld.LongNetLM(ld.DilatedPattern((ld.Window(8),)), VOCABULARY, 16, 1, 2, **LOOKUPS)  # noqa: E731
    whole = fitted(tmp_path, 6, model=make())
    first = fitted(tmp_path, 3, model=make())
    first[0].save_checkpoint(tmp_path / "step.ckpt")
    pl.seed_everything(7, verbose=False)
    again = fitted(tmp_path, 6, ckpt=tmp_path / "step.ckpt", model=make())
    assert first[3] + again[3] == whole[3]
    for x, y in zip(again[1].parameters(), whole[1].parameters(), strict=True):
        assert torch.equal(x, y)


# -- prompts in several calls ------------------------------------------------------------------------------------------
MODEL = lm(hashed={**HASHED_OPTIONS, "heads": 2}, depth=1).eval()
TOKENS = torch.randint(0, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(2))


def cuts(data, tokens):
    bounds = sorted(data.draw(st.sets(st.integers(1, tokens - 1), max_size=6))) if tokens > 1 else []
    return [b - a for a, b in itertools.pairwise([0, *bounds, tokens])]


@given(st.data())
@settings(max_examples=examples(15))
@torch.no_grad()
def test_prompts_in_calls(data):
    """Calls of any number of tokens equal one call. Samples may have prompts of different lengths."""
    want = MODEL(TOKENS)
    lengths = data.draw(st.lists(st.integers(1, 35), min_size=3, max_size=3))
    prompt, ragged = max(lengths), len(set(lengths)) > 1
    tokens = TOKENS[:, :prompt].clone()
    for sample, n in zip(tokens, lengths, strict=True):
        sample[n:] = 0
    caches = MODEL.transformer.new_caches(lengths=lengths, max_length=data.draw(st.sampled_from([None, 40])))
    got = torch.cat([MODEL(x, caches=caches) for x in tokens.split(cuts(data, prompt), 1)], 1)
    for b, n in enumerate(lengths):
        torch.testing.assert_close(got[b, :n], want[b, :n], rtol=1e-12, atol=1e-12)
    order = torch.tensor([0, 1, 2] if ragged else data.draw(st.permutations([0, 1, 2])))
    for cache in caches:
        cache.select(order)
    steps = [1] * (40 - prompt) if ragged else cuts(data, 40 - prompt)
    at = torch.tensor(lengths)[order]
    for n in steps:
        place = torch.arange(n) + at[:, None]
        keep = place < 40
        index = place.clamp_max(39)
        got = MODEL(TOKENS[order].gather(1, index), caches=caches)
        right = want[order[:, None], index]
        torch.testing.assert_close(got[keep], right[keep], rtol=1e-12, atol=1e-12)
        at = at + n
