"""State dicts of torchscale's decoders give the recorded logits. Features that a LongNetLM lacks are refused."""

import warnings
from pathlib import Path

import pytest
import torch

from lightning_dilated import LongNetLM

GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "longnet_torchscale_decoder").glob("*.pt"))
CASES = {path.stem: torch.load(path, weights_only=True) for path in GOLDEN}


def state(name):
    return {k: v.double() for k, v in CASES[name]["state_dict"].items()}


def load(name, source=None, **options):
    case = CASES[name]
    extra = {"scale_embedding": not case["options"].get("no_scale_embedding", True)}
    extra |= {"num_heads": case["num_heads"], "xpos_scale_base": case["options"].get("xpos_scale_base", 512)}
    source = state(name) if source is None else source
    return LongNetLM.from_torchscale(source, case["segment_lengths"], case["dilation_rates"], **{**extra, **options})


def equal(model, name):
    with torch.no_grad():
        got = model.eval()(CASES[name]["tokens"])
    torch.testing.assert_close(
        got.double(), CASES[name]["logits64"], rtol=0, atol=5e-6 if got.dtype == torch.float64 else 5e-5
    )


def test_all_cases_are_there():
    assert set(CASES) == {"plain", "subln_scaled", "xpos_tied"}


@pytest.mark.parametrize("name", CASES)
def test_recorded_logits(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(name)
    assert model.training and model.tie_embeddings == (name == "xpos_tied")
    equal(model, name)


def test_heads_are_told_by_xpos():
    assert load("xpos_tied", num_heads=None).num_heads == 4


def fairseq(tensors):
    return {f"decoder.{k}": v for k, v in tensors.items()}


FILES = {
    "state dict": lambda x: x,
    "fairseq": lambda x: {"model": fairseq(x), "step": 3},
    "beside an encoder": lambda x: {"encoder.embed_tokens.weight": x["embed_tokens.weight"], **fairseq(x)},
    "wrapped": lambda x: {f"module.net.{k}": v for k, v in x.items()},
}


@pytest.mark.parametrize("name", FILES)
def test_files(name, tmp_path):
    stored = {k: v.float() for k, v in state("subln_scaled").items()}
    torch.save(FILES[name](stored), tmp_path / "x.pt")
    equal(load("subln_scaled", tmp_path / "x.pt"), "subln_scaled")


@pytest.mark.parametrize("name", CASES)
def test_saved_and_loaded_again(name, tmp_path):
    load(name, dropout=0.1).save_pretrained(tmp_path)
    twin = LongNetLM.from_pretrained(tmp_path)
    assert twin.options.dropout == 0.1
    equal(twin, name)


def test_generates_as_it_computes():
    """Generation works beyond the shortest segment, where torchscale itself cannot decode."""
    model, prompt = load("xpos_tied").eval(), CASES["xpos_tied"]["tokens"][:, :20]
    out = model.generate(prompt, 25, temperature=0)
    with torch.no_grad():
        assert torch.equal(model(out)[:, 19:-1].argmax(-1), out[:, 20:])


def test_unused_tensors_are_reported():
    extra_tensors = {
        **state("plain"),
        "version": torch.tensor(3),
        "layers.0.self_attn.extra": torch.zeros(1),
        "other": torch.zeros(1),
    }
    with pytest.warns(UserWarning, match="does not use 2 tensors: layers.0.self_attn.extra, other"):
        equal(load("plain", extra_tensors), "plain")


def without(*names):
    return {k: v for k, v in state("subln_scaled").items() if not any(n in k for n in names)}


def having(**changes):
    return {**state("plain"), **{k.replace("__", "."): v for k, v in changes.items()}}


BAD = {
    "no tensor": (lambda: without("layers.1.ffn.fc1.bias"), {}, "lacks 1 tensors: layers.1.ffn.fc1.bias"),
    "post-norm": (
        lambda: {k: v for k, v in state("plain").items() if not k.startswith("layer_norm.")},
        {},
        "lacks 2 tensors: layer_norm.bias, layer_norm.weight. Only decoders that normalise before",
    ),
    "half of the sub-norms": (lambda: without("ffn_layernorm"), {}, "lacks 4 tensors: layers.0.ffn.ffn_layernorm.bias"),
    "no output layer": (lambda: without("output_projection"), {}, "lacks 1 tensors: output_projection.weight"),
    "no layers": (lambda: without("layers."), {}, "the number of layers must be at least 1, got 0"),
    "no embedding": (lambda: without("embed_tokens"), {}, "has one embed_tokens.weight, but this state dict has 0"),
    "learned positions": (
        lambda: having(embed_positions__weight=torch.zeros(2)),
        {},
        "does not compute: embed_positions",
    ),
    "experts": (lambda: having(layers__0__moe_layer__gate=torch.zeros(2)), {}, "does not compute: layers.0.moe_layer"),
    "cross-attention": (lambda: having(layers__0__encoder_attn__x=torch.zeros(2)), {}, "does not compute"),
    "no heads": (None, {"num_heads": None}, "num_heads cannot be derived"),
    "heads": (None, {"num_heads": 3}, "num_heads=3 does not fit dim=16"),
    "heads against xpos": (lambda: state("xpos_tied"), {"num_heads": 2}, "does not fit dim=16; xPos weights are for 4"),
    "sizes": (
        lambda: having(layers__1__ffn__fc1__bias=torch.zeros(2)),
        {},
        r"layers.1.ffn.fc1.bias is \(2,\), but the other tensors say that it is \(24,\)",
    ),
    "a list": (lambda: {"model": {}}, {}, "this state dict has 0; its names begin with nothing"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    make, options, text = BAD[name]
    with pytest.raises(ValueError, match=text):
        load("plain", make and make(), **options)


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"x\.pt: no such file"):
        load("plain", tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"x\.pt cannot be read as plain tensors"):
        load("plain", tmp_path / "x.pt")
    torch.save([torch.zeros(2)], tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"takes a state dict, .* got list"):
        load("plain", tmp_path / "x.pt")
