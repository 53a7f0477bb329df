"""Scores and embeddings of sequences equal hand-computed sums of logits on either strand, and are equivariant."""

import math

import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM, LongNetMLM
from lightning_dilated.data import decode_bases, encode_bases, reverse_complement
from lightning_dilated.ext.genomes.variants import AlleleWindows
from lightning_dilated.models.transformer import step_flops

from ...models import PATTERN

SIZES = {"vocab_size": 5, "dim": 16, "depth": 2, "num_heads": 4}
TEXTS = ["ACGTTAGGCATNACG", "TTGAC", "GATTACAGATTACAG", "C"]


def build(kind, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    model = kind(PATTERN, **{**SIZES, **options})
    model.configure_model()
    for parameter in model.parameters():  # weights that make predictions far from uniform
        parameter.data.mul_(3)
    return model.to(dtype)


def by_hand(model, text):
    """Compute token by token. Return (nats, tokens) of a sequence."""
    tokens, nats, count = encode_bases(text), 0.0, 0
    model = model.eval()
    for i, token in enumerate(tokens.tolist()):
        if token == 4 or (model.causal and i == 0):
            continue
        if model.causal:
            logits = model(tokens[None, :i])[0, -1]
        else:
            masked = tokens.clone()
            masked[i] = model.mask_token
            logits = model(masked[None])[0, i]
        nats, count = nats + float(logits.log_softmax(-1)[token]), count + 1
    return nats, count


def backwards(text):
    return decode_bases(reverse_complement(encode_bases(text)))


# -- letters -----------------------------------------------------------------------------------------------------------
def test_letters():
    assert encode_bases("ACGTNacgtnUuRyX"[:-1]).tolist() == [0, 1, 2, 3, 4] * 2 + [3, 3, 4, 4]
    assert decode_bases(encode_bases("ACGTN")) == "ACGTN" and decode_bases([]) == "" and len(encode_bases("")) == 0
    assert backwards("AACGTN") == "NACGTT"
    padded = torch.tensor([[0, 1, 2, 9, 9], [3, 3, 0, 4, 1]])
    assert reverse_complement(padded, torch.tensor([3, 5])).tolist() == [[1, 2, 3, 9, 9], [2, 4, 3, 0, 0]]
    with pytest.raises(ValueError, match=r"'X' at base 3 \(counted from 1\) is not a nucleotide"):
        encode_bases("ACX")
    with pytest.raises(ValueError, match="'é' at base 1"):
        encode_bases("é")
    with pytest.raises(ValueError, match="'€' at base 2"):
        encode_bases("A€")
    with pytest.raises(TypeError, match="got a list"):
        encode_bases(["A"])
    with pytest.raises(ValueError, match="token 5 is no base"):
        decode_bases([0, 5])
    with pytest.raises(ValueError, match="must be integers"):
        decode_bases(torch.zeros(2))


# -- scores ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [LongNetLM, LongNetMLM])
@pytest.mark.parametrize("strands", ["forward", "reverse", "both"])
def test_scores_are_those_of_the_logits(kind, strands):
    model = build(kind, dropout=0.5).train()
    got = model.score(TEXTS, strands=strands, batch_size=3)
    assert model.training and all(m.training for m in model.modules())
    other = [backwards(text) for text in TEXTS]
    readings = {"forward": [TEXTS], "reverse": [other], "both": [TEXTS, other]}[strands]
    expected = torch.tensor([[by_hand(model, x) for x in texts] for texts in readings], dtype=torch.float64).mean(0)
    torch.testing.assert_close(got.log_likelihood, expected[:, 0], rtol=1e-12, atol=1e-12)
    assert got.bases.tolist() == expected[:, 1].tolist()
    assert torch.equal(got.per_base.isnan(), got.bases == 0)
    assert got.per_base[0] == got.log_likelihood[0] / got.bases[0]


@pytest.mark.parametrize("kind", [LongNetLM, LongNetMLM])
def test_the_same_in_any_batch(kind):
    model = build(kind)
    whole = model.score(TEXTS, batch_size=8)
    for i, text in enumerate(TEXTS):
        alone = model.score([text], batch_size=1)
        torch.testing.assert_close(alone.log_likelihood, whole.log_likelihood[i : i + 1], rtol=1e-12, atol=1e-12)
    same = model.score([TEXTS[0]] * 3, batch_size=2).log_likelihood
    torch.testing.assert_close(same, whole.log_likelihood[:1].expand(3), rtol=1e-12, atol=1e-12)


def test_fewer_passes():
    """Pass j masks tokens j, j + K, ... By default, each pass masks one token."""
    model, text = build(LongNetMLM), TEXTS[0]
    tokens = encode_bases(text)
    want = 0.0
    for j in range(4):
        sites = torch.arange(j, len(tokens), 4)
        sites = sites[tokens[sites] != 4]
        masked = tokens.clone()
        masked[sites] = model.mask_token
        want += float(model.eval()(masked[None])[0, sites].log_softmax(-1).gather(1, tokens[sites, None]).sum())
    assert float(model.score([text], passes=4).log_likelihood) == pytest.approx(want, rel=1e-12)
    one = [model.score([text], passes=n).log_likelihood for n in (None, len(text), 99)]
    assert one[0] == one[1] == one[2]


def test_what_is_not_scored():
    model = build(LongNetLM)
    assert model.score(["ANNNA", "ACGTA"]).bases.tolist() == [1, 4]
    assert model.score(["ANNNA", "ACGTA"], ignore_tokens=[]).bases.tolist() == [4, 4]
    assert model.score(torch.tensor([[0, 1, 2]]), ignore_tokens=[1]).bases.tolist() == [1]
    own = build(LongNetMLM, vocab_size=6, mask_token=5)
    assert own.score([torch.tensor([0, 5, 4, 1])]).bases.tolist() == [2]
    extra = build(LongNetMLM)  # the mask token has an embedding, but is never predicted
    assert extra.score([torch.tensor([0, 5, 1])], ignore_tokens=[]).bases.tolist() == [2]
    text = build(LongNetLM, vocab_size=256)
    assert text.score([torch.tensor([4, 4, 4])]).bases.tolist() == [2]


@pytest.mark.parametrize(
    ("sequences", "options", "error", "message"),
    [
        ("ACGT", {}, TypeError, "put a single one in a list"),
        (torch.tensor([0, 1]), {}, TypeError, "put a single one in a list"),
        (["AC", "AX"], {}, ValueError, r"sequences\[1\]: 'X' at base 2"),
        (["AC", ""], {}, ValueError, r"sequences\[1\] must be a string or at least one"),
        ([torch.tensor([0, 7])], {}, ValueError, "from 0 to 7, and the model's are 0 to 4"),
        ([torch.tensor([0.5])], {}, ValueError, "got torch.float32"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), {}, ValueError, r"must be \(B, N\)"),
        (["AC"], {"strands": "left"}, ValueError, "strands must be one of forward, reverse, both"),
        (["AC"], {"batch_size": 0}, ValueError, "batch_size must be at least 1"),
    ],
)
def test_wrong_sequences(sequences, options, error, message):
    with pytest.raises(error, match=message):
        build(LongNetLM).score(sequences, **options)


def test_models_of_texts_take_no_bases():
    model = build(LongNetLM, vocab_size=256)
    with pytest.raises(
        ValueError, match=r"strings are bases, and this model's vocab_size=256 is no genome's \(5 to 16\)"
    ):
        model.score(["ACGT"])
    with pytest.raises(ValueError, match="strands='both' is for genomes"):
        model.score([torch.tensor([1, 2])], strands="both")
    with pytest.raises(ValueError, match="strands='both' is for genomes"):
        LongNetMLM(PATTERN, vocab_size=256, strands="both")


# -- alleles -----------------------------------------------------------------------------------------------------------
def alleles(reference, alternative, start, stop, substitution):
    return AlleleWindows(encode_bases(reference), encode_bases(alternative), start, stop, substitution)


SUBSTITUTION = alleles("ACGTTAGGCATTACG", "ACGTTAGACCTTACG", 7, 10, True)  # GCA -> ACC changes two sites
DELETION = alleles("ACGTTAGGCATTACG", "ACGTTAGATTACGTA", 7, 9, False)


@pytest.mark.parametrize("strands", ["forward", "reverse", "both"])
def test_alleles_by_a_causal_model(strands):
    model = build(LongNetLM)
    got = model.score_alleles([SUBSTITUTION, DELETION], strands=strands)
    for i, pair in enumerate((SUBSTITUTION, DELETION)):
        want = model.score([pair.reference, pair.alternative], strands=strands)
        assert got.score[i] == pytest.approx(float(want.log_likelihood.diff()), rel=1e-12)
        assert got.reference_bases[i] == got.alternative_bases[i] == 14


@pytest.mark.parametrize("other", [False, True])
def test_a_substitution_by_a_masked_model(other):
    model = build(LongNetMLM)
    got = model.score_alleles([SUBSTITUTION], strands="reverse" if other else "forward")
    masked, sites = SUBSTITUTION.reference.clone(), torch.tensor([7, 9])
    masked[sites] = model.mask_token
    letters = SUBSTITUTION.reference[sites], SUBSTITUTION.alternative[sites]
    if other:
        masked, sites, letters = reverse_complement(masked), 14 - sites, tuple(3 - x for x in letters)
    log = model.eval()(masked[None])[0, sites].log_softmax(-1)
    reference, alternative = (float(log.gather(1, x[:, None]).sum()) for x in letters)
    assert got.reference[0] == pytest.approx(reference, rel=1e-12) and got.reference_bases[0] == 2
    assert got.alternative[0] == pytest.approx(alternative, rel=1e-12) and got.alternative_bases[0] == 2
    assert got.score[0] == pytest.approx(alternative - reference, rel=1e-12)


@pytest.mark.parametrize("flank", [0, 3, 50])
def test_a_deletion_by_a_masked_model(flank):
    """Both windows have the same number of sites, and each site is masked in its own pass."""
    model = build(LongNetMLM)
    for strands in ("forward", "reverse"):
        got = model.score_alleles([DELETION], strands=strands, flank=flank, batch_size=5)
        sites = range(max(0, 7 - flank), min(15, 9 + flank))
        for tokens, nats, count in (
            (DELETION.reference, got.reference, got.reference_bases),
            (DELETION.alternative, got.alternative, got.alternative_bases),
        ):
            want = 0.0
            for site in sites:
                masked, at = tokens.clone(), site
                masked[site] = model.mask_token
                right = tokens[site]
                if strands == "reverse":
                    masked, at, right = reverse_complement(masked), 14 - site, 3 - right
                want += float(model.eval()(masked[None])[0, at].log_softmax(-1)[right])
            assert nats[0] == pytest.approx(want, rel=1e-12) and count[0] == len(sites)


# -- embeddings --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [LongNetLM, LongNetMLM])
@pytest.mark.parametrize("layer", [None, 0, -1])
def test_embeddings(kind, layer):
    model = build(kind).eval()
    got = model.embed(TEXTS, pool="none", layer=layer, batch_size=3)
    mean = model.embed(TEXTS, layer=layer)
    assert got.shape == (4, 15, 16) and mean.shape == (4, 16) and not got.requires_grad
    for i, text in enumerate(TEXTS):
        x, states = model.embedding(encode_bases(text)[None]), []
        last = model.transformer(x, watch=states.append)
        want = last if layer is None else states[1:][layer]
        torch.testing.assert_close(got[i, : len(text)], want[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mean[i], want[0].mean(0), rtol=1e-12, atol=1e-12)
        assert not got[i, len(text) :].any()
    with pytest.raises(ValueError, match=r"layer=2, but the model has 2 layers: -2 to 1"):
        model.embed(TEXTS, layer=2)
    with pytest.raises(ValueError, match="no sequences"):
        model.embed([])


@pytest.mark.parametrize("kind", [LongNetLM, LongNetMLM])
def test_embeddings_of_both_strands(kind):
    model, other = build(kind), [backwards(text) for text in TEXTS]
    both_strands = model.embed(TEXTS, pool="none", strands="both")
    for name, texts in (("forward", TEXTS), ("reverse", other)):
        parts = model.embed(texts, pool="none", strands=name)
        assert not torch.allclose(parts, both_strands)
    mean = (model.embed(TEXTS, pool="none") + model.embed(TEXTS, pool="none", strands="reverse")) / 2
    torch.testing.assert_close(both_strands, mean, rtol=1e-12, atol=1e-12)
    flipped = model.embed(other, pool="none", strands="both")
    for row, back, text in zip(both_strands, flipped, TEXTS, strict=True):
        torch.testing.assert_close(back[: len(text)].flip(0), row[: len(text)], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        model.embed(TEXTS, strands="both"), model.embed(other, strands="both"), rtol=1e-12, atol=1e-12
    )


# -- an equivariant model ----------------------------------------------------------------------------------------------
COMPLEMENT = [3, 2, 1, 0, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_of_the_other_strand(dtype):
    """output(rc(x)) equals flip(output(x)) bit by bit, but only with both strands."""
    model, x = build(LongNetMLM, strands="both", dtype=dtype).eval(), torch.randint(0, 5, (2, 37))
    want = model(x).flip(1)[..., COMPLEMENT]
    assert torch.equal(model(reverse_complement(x)), want)
    one = build(LongNetMLM, dtype=dtype).eval()
    assert not torch.allclose(one(reverse_complement(x)), one(x).flip(1)[..., COMPLEMENT], atol=1e-2)
    by_hand = (one(x) + one(reverse_complement(x)).flip(1)[..., COMPLEMENT]) / 2
    torch.testing.assert_close(model(x), by_hand)


def test_lengths_and_documents():
    """Each sample and each document is reversed separately."""
    model = build(LongNetMLM, strands="both").eval()
    rows = [torch.randint(0, 5, (n,)) for n in (37, 20, 1)]
    alone = [model(row[None])[0] for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    got = model(padded, lengths=torch.tensor([37, 20, 1]))
    bounds = torch.tensor([0, 37, 57, 58], dtype=torch.int32)
    packed = model(torch.cat(rows)[None], cu_seqlens=bounds)[0]
    for i, want in enumerate(alone):
        torch.testing.assert_close(got[i, : len(want)], want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(packed[bounds[i] : bounds[i + 1]], want, rtol=1e-12, atol=1e-12)


def test_the_equivariant_model_trains_scores_and_is_saved(tmp_path):
    model = build(LongNetMLM, strands="both", ignore_tokens=[4])
    batch = {"tokens": torch.randint(0, 5, (2, 40)), "index": torch.arange(2)}
    total, count = model.loss_terms(batch)
    masked, chosen = model.masked(batch)
    want = torch.nn.functional.cross_entropy(model(masked)[chosen], batch["tokens"][chosen], reduction="sum")
    torch.testing.assert_close(total, want, rtol=1e-12, atol=0)
    total.backward()
    assert all(p.grad is not None for p in model.parameters()) and count == chosen.sum()
    scores = [model.score(TEXTS, strands=x).log_likelihood for x in ("forward", "reverse", "both")]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scores[0], scores[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.embed(TEXTS), model.embed([backwards(x) for x in TEXTS]), rtol=1e-12, atol=1e-12)
    model.save_pretrained(tmp_path)
    again = LongNetMLM.from_pretrained(tmp_path)
    assert again.strands == "both" and torch.equal(again.double().score(TEXTS).log_likelihood, scores[0])


def test_twice_the_work():
    one, two_strands = build(LongNetMLM), build(LongNetMLM, strands="both")
    assert step_flops(two_strands, 40, [40]) == 2 * step_flops(one, 40, [40])


def test_ranks_that_share_a_sequence_are_refused(monkeypatch):
    model = build(LongNetMLM, strands="both").eval()
    shared = type("Group", (), {"ranks": 2})()
    monkeypatch.setattr("lightning_dilated.ext.genomes.strands.active_sequence", lambda: shared)
    with pytest.raises(ValueError, match="strands='both' reads sequences backwards, but 2 ranks"):
        model._read(torch.zeros(1, 4, dtype=torch.int64))


def test_words_of_predictions(tmp_path):
    """With `predict_embeddings`, a prediction is the mean of the last hidden states, over both strands if enabled."""
    batch = {"tokens": torch.randint(0, 4, (2, 24)), "labels": torch.zeros(2, 24, dtype=torch.int64)}
    batch |= {"index": torch.arange(2), "record": ["a", "b"], "start": torch.tensor([0, 24])}
    for kind, options in ((LongNetLM, {}), (LongNetMLM, {}), (LongNetMLM, {"strands": "both"})):
        model = build(kind, predict_embeddings=True, **options).eval()
        with torch.no_grad():
            got = model.predict_step(batch, 0)
        assert list(got) == ["index", "record", "start", "embedding"]
        torch.testing.assert_close(got["embedding"], model.embed(batch["tokens"]), rtol=1e-12, atol=1e-12)
        assert "predict_embeddings" not in model.hparams
        plain = build(kind, **options).eval().predict_step(batch, 0)
        assert list(plain)[:3] == ["index", "record", "start"] and "embedding" not in plain
        assert math.isfinite(float(plain["bits_per_byte" if kind is LongNetLM else "bits_per_token"][0]))


def test_dense_pattern_sees_all():
    """The score of a masked base depends on bases on both sides."""
    torch.manual_seed(0)
    model = LongNetMLM(DilatedPattern.dense(), **SIZES).eval()
    left, right = model.score(["ACGTA", "CCGTA"]), model.score(["ACGTA", "ACGTC"])
    assert left.log_likelihood[0] != left.log_likelihood[1] and right.log_likelihood[0] != right.log_likelihood[1]
