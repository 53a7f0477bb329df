"""Models of checkpoints: the tokenizers that fit them, and class paths of older files."""

import json
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM, LongNetMLM
from lightning_dilated.cli.load_model import load_module
from lightning_dilated.ext.decoding.load import load_language_model

#: (vocab_size and bytes_per_token of the model, size of the tokenizer or None, part of the error)
CASES = {
    "bytes": (256, 1.0, None, None),
    "bytes, three words": (256, 1.0, 3, "so it is over bytes, but the tokenizer has 3 tokens. Leave --tokenizer out"),
    "bytes, a little less": (256, 1.0, 255, "so it is over bytes"),
    "tokens of one byte": (256, 1.0, 256, None),
    "256 tokens": (256, 2.5, 250, None),
    "256 tokens, no tokenizer": (256, 2.5, None, "vocab_size 256 and bytes_per_token 2.5; .* --tokenizer"),
    "no tokenizer": (270, 2.5, None, "vocab_size 270; .*--tokenizer with"),
    "too large": (270, 2.5, 271, "the tokenizer has 271 tokens"),
    "the same": (270, 2.5, 270, None),
    "half": (270, 2.5, 135, None),
    "three of 270": (270, 2.5, 3, UserWarning("the tokenizer has only 3 tokens")),
    "padded to 1,024": (3072, 2.5, 2048, None),
    "more than padding": (3072, 2.5, 2047, UserWarning("the tokenizer has only 2047 tokens")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_tokenizer_goes_with_the_model(tmp_path: Path, name: str) -> None:
    vocab_size, bytes_per_token, tokens, says = CASES[name]
    pattern = DilatedPattern.longnet([16], [1])
    model = LongNetLM(pattern, vocab_size, dim=8, depth=1, num_heads=1, bytes_per_token=bytes_per_token)
    model.save_pretrained(tmp_path)
    if isinstance(says, str):
        with pytest.raises(ValueError, match=says):
            load_language_model(tmp_path, tokens)
    elif says is not None:
        with pytest.warns(UserWarning, match=str(says)):
            load_language_model(tmp_path, tokens)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*tokenizer")
            assert load_language_model(tmp_path, tokens).vocab_size == vocab_size


def test_a_model_of_masked_tokens_does_not_continue_texts(tmp_path: Path) -> None:
    LongNetMLM(DilatedPattern.longnet([16], [1]), dim=8, depth=1, num_heads=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a LongNetMLM with vocab_size 256"):
        load_language_model(tmp_path, None)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_class_that_stood_elsewhere(tmp_path: Path, kind: str) -> None:
    """Files that were written before the classes moved contain their old paths."""
    model = LongNetLM(DilatedPattern.longnet([16], [1]), dim=8, depth=1, num_heads=1)
    before = "lightning_dilated.models.longnet_lm.LongNetLM"
    if kind == "folder":
        model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["class_path"] == "lightning_dilated.LongNetLM"
        (tmp_path / "config.json").write_text(json.dumps({**config, "class_path": before}))
        loaded = load_module(tmp_path)
    else:
        model.configure_model()
        stored = {"state_dict": model.state_dict(), "hyper_parameters": dict(model.hparams), "class_path": before}
        stored["pytorch-lightning_version"] = pl.__version__
        torch.save(stored, tmp_path / "before.ckpt")
        loaded = load_module(tmp_path / "before.ckpt")
    assert type(loaded) is LongNetLM
    for name, x in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], x, rtol=0, atol=0)
