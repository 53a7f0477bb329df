"""How the rotary base of a layer is chosen (by length, by layer, none), the warning about a base that is too small for
the length, and dense heads without positions.
"""

import warnings
from pathlib import Path

import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetClassifier, LongNetLM, LongNetMLM
from lightning_dilated.callbacks import ShardedCheckpoint
from lightning_dilated.models.transformer import base_of_length, layer_bases, rotary_hint, served_length

from . import SIZES, batch, loader, trainer

GOLDEN = Path(__file__).parents[1] / "golden" / "stored_positions" / "hybrid.ckpt"
HYBRID = {"hybrid": {"local": 4, "global_every": 2}}
WIDE, NARROW = DilatedPattern.dense(), DilatedPattern.dense(16)


@pytest.mark.parametrize(
    "tokens, base", [(1, 1e4), (1995, 1e4), (2048, 1e5), (16384, 1e6), (65536, 1e7), (262144, 1e8), (1 << 20, 1e9)]
)
def test_of_length(tokens, base):
    """The base is 0.0424 N^1.628, rounded up to a power of ten, and at least 1e4."""
    assert base_of_length(tokens) == base
    assert served_length(base) >= tokens


BASES = {
    "nothing": ((None, None), (1e4,) * 4),
    "a length": ((None, 65536), (1e7,) * 4),
    "in words": (("length", 1 << 20), (1e9,) * 4),
    "a number": ((5e5, 65536), (5e5,) * 4),
    "none": (("none", None), (None,) * 4),
    "in turns": ((["none", 1e4], None), (None, 1e4, None, 1e4)),
    "one a layer": (([1e4, 1e4, 1e4, "length"], 65536), (1e4, 1e4, 1e4, 1e7)),
}


@pytest.mark.parametrize("name", BASES)
def test_layers(name):
    value, want = BASES[name]
    assert layer_bases(*value, 4) == want
    assert layer_bases(*value, 4, "none") == (None,) * 4


def test_xpos_keeps_its_base():
    assert layer_bases(None, 1 << 20, 2, "xpos") == (1e4, 1e4)


REFUSED = {
    "no length": (("length", None), ValueError, 'rotary_base="length" needs max_seq_len'),
    "another word": (("long", None), TypeError, 'must be a number, "length", "none", or a list'),
    "a bool": ((True, None), TypeError, "must be a number"),
    "too low": ((0.5, None), ValueError, "rotary base must be above 1"),
    "too many": (([1e4] * 5, None), ValueError, "lists 5 bases for 4 layers"),
    "infinite": ((float("inf"), None), ValueError, "above 1 and finite"),
    "a mapping": (({1e4: 3}, None), TypeError, "must be a number"),
    "none of a list": (([], None), ValueError, "lists 0 bases"),
    "no tokens": ((None, 0), ValueError, "max_seq_len must be at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    value, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        layer_bases(*value, 4)


HINTS = {
    "served": ([1e7], [WIDE], 65536, None, None),
    "narrow": ([1e4], [NARROW], 65536, None, None),
    "short": ([1e4], [WIDE], 1500, None, None),
    "no positions": ([None], [WIDE], 65536, None, None),
    "length unknown": ([1e4], [NARROW, WIDE], None, None, "layer 1 attends over the whole sequence"),
    "too long": (
        [1e4],
        [WIDE],
        65536,
        None,
        "attends over 65,536 tokens.*Set max_seq_len to the longest sequence, 65,536,",
    ),
    "longer than planned": ([1e7], [WIDE], 1 << 20, 65536, "Set max_seq_len to the longest sequence, 1,048,576,"),
    "planned": ([1e4], [WIDE], None, 65536, 'Set rotary_base to "length", which is 1e\\+07 here'),
}


@pytest.mark.parametrize("name", HINTS)
def test_hint(name):
    import re

    bases, patterns, tokens, made_for, says = HINTS[name]
    hint = rotary_hint(bases * len(patterns), patterns, tokens, made_for)
    assert hint is None if says is None else re.search(says, hint), hint


def said(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(w.message) for w in caught if "rotary_base" in str(w.message)]


def test_a_model_warns_as_it_is_made():
    assert len(said(lambda: LongNetLM(WIDE, **SIZES))) == 1
    assert not said(lambda: LongNetLM(WIDE, **SIZES, max_seq_len=65536))
    assert not said(lambda: LongNetLM(NARROW, **SIZES))
    assert not said(lambda: LongNetLM(WIDE, **SIZES, position_encoding="none"))
    assert not said(lambda: LongNetLM(WIDE, **SIZES, position_encoding="xpos"))
    assert len(said(lambda: LongNetLM(HYBRID, **SIZES))) == 1
    assert not said(lambda: LongNetLM(HYBRID, **SIZES, global_rotary=False))


def test_a_fit_on_longer_sequences_warns():
    model = LongNetLM(DilatedPattern.dense(), **SIZES, max_seq_len=32, rotary_base=1.5)
    messages = said(lambda: trainer(max_epochs=1).fit(model, loader(batch(1, 40), batch(1, 40))))
    (rotary,) = (x for x in messages if "LongNetLM at 40 tokens" in x)
    assert "layer 0 attends over 40 tokens" in rotary and len(messages) == 2
    assert any("LongNetLM is made for max_seq_len=32, but trains on a sequence of 40 tokens" in x for x in messages)


@pytest.mark.parametrize("kind", [LongNetLM, LongNetClassifier])
def test_layers_have_their_own(kind):
    """Each layer rotates q and k with its own base; a layer without positions does not rotate."""
    sizes = {"dim": 16, "depth": 4, "num_heads": 2}
    options = {"vocab_size": 11, **({} if kind is LongNetLM else {"num_classes": 2})}
    model = kind(NARROW, **sizes, **options, rotary_base=[1e4, "none", 5e5, "length"], max_seq_len=65536)
    model.configure_model()
    bases = [x and x.base for x in model.transformer.rotaries]
    assert bases == [1e4, None, 5e5, 1e7] == list(model.rotary_bases)
    x = torch.randn(1, 12, 16)
    want = x
    for block in model.transformer.blocks:
        want = block(want)
    torch.testing.assert_close(model.transformer(x, normed=False), want)


def test_checkpoints_keep_it(tmp_path):
    """A file keeps its base. The base of a file from before max_seq_len is 10,000."""
    model = LongNetLM([NARROW, WIDE], **{**SIZES, "depth": 2}, max_seq_len=65536)
    twin = LongNetLM.from_pretrained(model.save_pretrained(tmp_path))
    assert twin.rotary_bases == (1e7, 1e7) and twin.max_seq_len == 65536 and twin.patterns == (NARROW, WIDE)
    assert LongNetLM.from_pretrained(tmp_path, max_seq_len=1 << 20).rotary_bases == (1e7, 1e7)  # the base from training
    for kind in (LongNetLM, LongNetMLM):
        assert kind(NARROW, **SIZES).hparams.rotary_base == 1e4  # fixed when the model is created
    assert LongNetClassifier(NARROW, vocab_size=11, num_classes=2, dim=16, num_heads=2).hparams.rotary_base == 1e4
    old = {**dict(model.hparams), "rotary_base": 10000.0}
    del old["max_seq_len"]
    assert LongNetLM(**old).rotary_bases == (1e4, 1e4)


@pytest.mark.parametrize("folder", [False, True], ids=["file", "sharded"])
def test_a_run_refuses_other_bases_than_were_trained(tmp_path, folder):
    """A run raises if the base differs from the checkpoint's, because the shapes of weights would not reveal it."""
    strategy = {"strategy": "ring_dilated"} if folder else {}
    saver = [ShardedCheckpoint(str(tmp_path / "sharded"), every_n_train_steps=1)] if folder else []
    run = trainer(max_steps=1, callbacks=saver, default_root_dir=tmp_path, enable_checkpointing=folder, **strategy)
    run.fit(LongNetLM(NARROW, **SIZES), loader(batch(1, 20)))
    path = next((tmp_path / "sharded").glob("step-*")) if folder else tmp_path / "x.ckpt"
    if not folder:
        run.save_checkpoint(path)
    other = LongNetLM(NARROW, **SIZES, max_seq_len=65536)
    with pytest.raises(ValueError, match=r"trained with rotary_base=10000.0, and this model has 10000000.0"):
        trainer(**strategy).validate(other, loader(batch(1, 20)), ckpt_path=str(path), verbose=False)
    trainer(**strategy).validate(LongNetLM(NARROW, **SIZES), loader(batch(1, 20)), ckpt_path=str(path), verbose=False)
    with pytest.warns(UserWarning, match="the checkpoint was trained with .*16.* attends by .*8"):
        narrower = LongNetLM(DilatedPattern.dense(8), **SIZES)
        trainer(**strategy).validate(narrower, loader(batch(1, 20)), ckpt_path=str(path), verbose=False)


# -- dense heads without positions -------------------------------------------------------------------------------------
def test_a_model_without_the_key_keeps_its_positions():
    """A checkpoint of a version without `global_rotary` computes the recorded logits."""
    stored = torch.load(GOLDEN, weights_only=True)
    assert "global_rotary" not in stored["hyper_parameters"]
    model = LongNetLM.load_from_checkpoint(GOLDEN).double().eval()
    assert model.hparams.global_rotary is True
    with torch.no_grad():
        torch.testing.assert_close(model(stored["tokens"]), stored["logits64"], rtol=1e-9, atol=1e-9)
        other = LongNetLM.load_from_checkpoint(GOLDEN, global_rotary=False).double().eval()
        assert (other(stored["tokens"]) - stored["logits64"]).abs().max() > 0.1
    other = LongNetLM(**{**stored["hyper_parameters"], "global_rotary": False})
    with pytest.raises(ValueError, match="trained with global_rotary=True, and this model has False"):
        trainer().validate(other, loader(batch(1, 20, vocab_size=7)), ckpt_path=str(GOLDEN), verbose=False)


def test_checkpoints_keep_dense_heads_without_positions(tmp_path):
    model = LongNetLM(HYBRID, **SIZES, max_seq_len=64, global_rotary=False)
    run = trainer(max_steps=1)
    run.fit(model, loader(batch(1, 20)))
    run.save_checkpoint(tmp_path / "x.ckpt")
    model.eval()
    twins = (
        LongNetLM.load_from_checkpoint(tmp_path / "x.ckpt"),
        LongNetLM.from_pretrained(model.save_pretrained(tmp_path)),
    )
    tokens = batch(1, 20)["tokens"]
    for twin in twins:
        assert twin.hparams.global_rotary is False
        assert torch.equal(twin.eval()(tokens), model(tokens))
    other = LongNetLM(HYBRID, **SIZES, max_seq_len=64)
    with pytest.raises(ValueError, match="trained with global_rotary=False, and this model has True"):
        trainer().validate(other, loader(batch(1, 20)), ckpt_path=str(tmp_path / "x.ckpt"), verbose=False)


def test_all_heads_of_a_layer_without_positions():
    """With `global_rotary=False`, a layer of dense heads equals a layer with `rotary_base="none"`."""
    patterns, options = [NARROW, WIDE], {**SIZES, "max_seq_len": 64}
    model = LongNetLM(patterns, **options, global_rotary=False)
    other = LongNetLM(patterns, **options, rotary_base=["length", "none"])
    for x in (model, other):
        x.configure_model()
    other.load_state_dict(model.state_dict())
    tokens = batch(1, 40)["tokens"]
    assert torch.equal(model.eval()(tokens), other.eval()(tokens))
