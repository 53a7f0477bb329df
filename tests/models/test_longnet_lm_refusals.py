"""LongNetLM's errors in the constructor and in calls, and its warnings."""

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated import Branch, DilatedPattern, LongNetLM

from . import PATTERN, SIZES, batch, loader, tiny, trainer


def make(**options):
    return lambda: LongNetLM(options.pop("pattern", PATTERN), **{**SIZES, **options})


REFUSED = {
    "pattern": (make(pattern=[(4, 1)]), TypeError, "pattern is given as a mapping"),
    "pattern key": (make(pattern={"segment_length": [4]}), ValueError, "Did you mean 'segment_lengths'"),
    "vocab_size": (make(vocab_size=0), ValueError, "vocab_size must be at least 1"),
    "dim": (make(dim=17), ValueError, "num_heads=4 must divide dim=17"),
    "depth": (make(depth=2.0), TypeError, "depth must be an integer, got 2.0"),
    "num_heads": (make(num_heads=0), ValueError, "num_heads must be at least 1"),
    "num_kv_heads": (make(num_kv_heads=3), ValueError, "num_kv_heads=3 must divide num_heads=4"),
    "shift_layers": (make(shift_layers="all"), ValueError, "shift_layers must be none or odd; got 'all'"),
    "shift of attended padding": (
        make(pattern=DilatedPattern([(4, 1)], padding="attended"), shift_layers="odd"),
        ValueError,
        'shift_layers="odd" needs padding="masked"',
    ),
    "residual_dtype": (
        make(residual_dtype="int8"),
        ValueError,
        "residual_dtype must be float32, bfloat16, float16 or null",
    ),
    "norm": (make(norm="batch"), ValueError, "norm must be one of rmsnorm, layernorm"),
    "ffn": (make(ffn="relu"), ValueError, "ffn must be one of swiglu, gelu; got 'relu'"),
    "dropout": (make(dropout=1), ValueError, "dropout must be a number in"),
    "dropout nan": (make(dropout=float("nan")), ValueError, "dropout must be a number in"),
    "attention_dropout": (make(attention_dropout=True), TypeError, "attention_dropout must be a number"),
    "bytes_per_token": (make(bytes_per_token=0), ValueError, r"bytes_per_token must be a number in \(0, inf\), got 0"),
    # as its docstring says, the constructor raises these errors, not only Lightning's later call that builds the layers
    "ffn_dim": (make(ffn_dim=0), ValueError, "ffn_dim must be at least 1"),
    "position_encoding": (
        make(position_encoding="alibi"),
        ValueError,
        "position_encoding must be none, rotary or xpos",
    ),
    "odd head dim": (make(dim=12), ValueError, "head_dim must be even"),
    "rotary_base": (make(rotary_base=0.5), ValueError, "rotary base must be above 1"),
    "xpos_scale_base": (make(position_encoding="xpos", xpos_scale_base=0), ValueError, "xpos_scale_base must be"),
    "no dense heads": (make(global_rotary=False), ValueError, "no layer has a dense head.*Take a hybrid pattern"),
    "half a group": (
        make(
            pattern=DilatedPattern([Branch(4, 1, heads=[0]), Branch(None, 1, heads=[1, 2, 3])]),
            num_kv_heads=2,
            global_rotary=False,
        ),
        ValueError,
        r"whole groups of dense heads: query heads \[1, 2, 3\]",
    ),
    "global_rotary": (make(global_rotary="no"), TypeError, "global_rotary must be"),
    "engine": (make(engine="fast"), ValueError, "engine must be one of"),
    "shapes": (
        lambda: tiny().loss_terms({**batch(2, 9), "tokens": torch.ones(2, 8).long()}),
        ValueError,
        "already shifted",
    ),
    "1-D": (lambda: tiny().loss_terms({k: v[0] for k, v in batch(2, 9).items()}), ValueError, r"must both be \(B, N\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("shape", [(1,), (2 * 8,), (3, 8)])
def test_positions_of_another_shape_are_refused(shape):
    model = LongNetLM(DilatedPattern.dense(), dim=16, depth=1, num_heads=2)
    with pytest.raises(ValueError, match=r"positions must be \(8,\) or \(2, 8\)"):
        model(torch.zeros(2, 8, dtype=torch.int64), positions=torch.zeros(shape, dtype=torch.int64))


class Vocabulary(pl.LightningDataModule):
    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size

    def train_dataloader(self):
        return loader(batch(2, 16))


@pytest.mark.parametrize("tokens, bytes_per_token, told", [(513, 1.0, True), (512, 1.0, False), (513, 3.7, False)])
def test_bits_of_a_token_are_not_taken_for_those_of_a_byte(recwarn, tokens, bytes_per_token, told):
    """If tokens are not bytes and `bytes_per_token` is not set, bits per byte would be several times too high."""
    model = tiny(dtype=torch.float32, vocab_size=1000, bytes_per_token=bytes_per_token)
    trainer(max_steps=1).fit(model, Vocabulary(tokens))
    messages = [str(x.message) for x in recwarn if "bytes_per_token is 1" in str(x.message)]
    assert bool(messages) == told and all(f"but {tokens} different tokens" in x for x in messages)
