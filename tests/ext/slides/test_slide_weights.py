"""Released slide encoders reproduce recorded outputs. All weights are loaded. Errors name missing weights."""

import json

import pytest
import torch

from lightning_dilated import SlideEncoder
from lightning_dilated.ext.slides import weights as slide_weights
from lightning_dilated.ext.slides.weights import own_weights, released_parameters, sizes_of

from .slides import GOLDEN, SIZES, encoder

RECORDED = sorted(GOLDEN.glob("*.pt"))


def load(path, folder, change=lambda state: {"model": state}, **options):
    """Return (encoder, recording), with the weights of the recording."""
    data = torch.load(path, weights_only=True)
    torch.save(change(data["state_dict"]), folder / "release.pth")
    arguments = {"grid": data["slide_ngrids"], "segment_lengths": data["segment_lengths"]}
    return SlideEncoder.from_gigapath(folder / "release.pth", **{**arguments, **options}), data


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.stem)
def test_recorded_outputs(path, tmp_path):
    model, data = load(path, tmp_path)
    with torch.no_grad():
        got = model(data["tile_embeds"], data["coords"])
        layers = model(data["tile_embeds"], data["coords"], all_layers=True)
    torch.testing.assert_close(got, data["output"], rtol=0, atol=1e-5)
    assert len(layers) == len(data["all_layer_outputs"]) == 3
    for a, b in zip(layers, data["all_layer_outputs"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.stem)
def test_exact_mode_differs_where_pads_were_attended(path, tmp_path):
    model, data = load(path, tmp_path, compat=False)
    with torch.no_grad():
        error = (model(data["tile_embeds"], data["coords"]) - data["output"]).abs().max()
    assert (error < 1e-5) == ("no_padding" in path.stem)


def test_half_precision_stays_near(tmp_path):
    model, data = load(RECORDED[0], tmp_path)
    with torch.no_grad():
        got = model.bfloat16()(data["tile_embeds"], data["coords"])
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), data["output"], rtol=0, atol=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.stem)
def test_recorded_outputs_on_a_gpu(path, tmp_path):
    """Outputs agree to 1e-5 in float32, and approximately in bfloat16."""
    model, data = load(path, tmp_path)
    inputs = data["tile_embeds"].cuda(), data["coords"].cuda()
    with torch.no_grad():
        exact, rough = model.cuda()(*inputs), model.bfloat16()(*inputs)
    torch.testing.assert_close(exact.cpu(), data["output"], rtol=0, atol=1e-5)
    torch.testing.assert_close(rough.float().cpu(), data["output"], rtol=0, atol=0.1)


def released(depth, dim, features, hidden):
    """Return names and shapes of a release of this size, derived from the recorded 12-layer model."""
    shapes = json.loads((GOLDEN / "gigapath_slide_enc12l768d_keys.json").read_text())["keys"]
    sizes = {768: dim, 1536: features, 3072: hidden, 1: 1}
    layer = {k: v for k, v in shapes.items() if k.startswith("encoder.layers.0.")}
    names = {k: v for k, v in shapes.items() if not k.startswith("encoder.layers.")}
    for i in range(depth):
        names |= {k.replace(".0.", f".{i}.", 1): v for k, v in layer.items()}
    return {k: [sizes[x] for x in v] for k, v in names.items()}


RELEASES = {
    "12l768d": (12, 768, 1536),
    "24l1024d": (24, 1024, 1536),
    "12l1536d": (12, 1536, 1536),
    "12l384d": (12, 384, 384),
}


@pytest.mark.parametrize("name", RELEASES)
def test_every_name_and_shape_of_a_release(name):
    depth, dim, features = RELEASES[name]
    shapes = released(depth, dim, features, 4 * dim)
    if name == "12l768d":
        recorded = json.loads((GOLDEN / "gigapath_slide_enc12l768d_keys.json").read_text())
        assert shapes == recorded["keys"] and len(shapes) == 247
    with torch.device("meta"):
        own = own_weights({k: torch.empty(v) for k, v in shapes.items()}, "file", 1000)
        model = SlideEncoder(**sizes_of(own))
        model.configure_model()
    assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in model.named_parameters()}
    assert sizes_of(own) == {"feature_dim": features, "dim": dim, "depth": depth, "ffn_dim": 4 * dim}
    if name == "12l768d":
        assert sum(p.numel() for p in model.parameters()) == recorded["parameters"]
        assert [b.segment_length for b in model.pattern.branches] == recorded["args"]["segment_length"]
        assert [b.dilation_rate for b in model.pattern.branches] == recorded["args"]["dilated_ratio"]


def table(state, dim=64, side=32):
    """Return the state dict with an additional position table, which is computed row by row."""
    steps = torch.arange(side, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(dim // 4).double() / (dim / 4))
    axis = torch.cat([steps.sin(), steps.cos()], 1)
    rows = [torch.cat([axis[y], axis[x]]) for x in range(side) for y in range(side)]
    return {**state, "pos_embed": torch.stack([torch.zeros(dim).double(), *rows]).float()[None]}


LAYOUTS = {
    "bare": lambda state: state,
    "of data parallel training": lambda state: {f"module.{k}": v for k, v in state.items()},
    "part of a fine-tuned model": lambda state: {
        **{f"slide_encoder.{k}": v for k, v in state.items()}, "classifier.0.weight": torch.ones(2, 64),
    },
    "with its positions": lambda state: {"model": table(state)},
    "half precision": lambda state: {k: v.half() for k, v in state.items()},
    "extra entries": lambda state: {"model": {**state, "mask_token": torch.zeros(1, 1, 64)}, "epoch": 3},
}  # fmt: skip
TELLS = {"part of a fine-tuned model": "classifier.0.weight", "extra entries": "mask_token"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(slide_weights, "rank_zero_info", said.append)
    model, data = load(RECORDED[0], tmp_path, LAYOUTS[name])
    with torch.no_grad():
        got = model(data["tile_embeds"], data["coords"])
    torch.testing.assert_close(got, data["output"], rtol=0, atol=1e-2 if name == "half precision" else 1e-5)
    assert (len(said) == 1 and "1 entries besides" in said[0] and TELLS[name] in said[0]) if name in TELLS else not said


def without(*names):
    return lambda state: {k: v for k, v in state.items() if k not in names}


BAD = {
    "missing": (without("encoder.layers.1.ffn.fc2.bias"), "lacks 1 of 47 parameters.*encoder.layers.1.ffn.fc2.bias"),
    "no class token": (without("cls_token"), "no single cls_token"),
    "two class tokens": (lambda state: {**state, "x.cls_token": state["cls_token"]}, "no single cls_token"),
    "learned positions": (
        lambda state: {**table(state), "pos_embed": torch.ones(1, 1025, 64)},
        "not the fixed sin-cos",
    ),
    "another grid": (lambda state: table(state, side=16), "257 positions, for a 16 x 16 grid, .*; set grid=16"),
    "no weights": (lambda state: {"model": "none"}, "holds no weights"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name, tmp_path):
    change, says = BAD[name]
    with pytest.raises(ValueError, match=says):
        load(RECORDED[0], tmp_path, change)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file of slide encoder weights"):
        SlideEncoder.from_gigapath(tmp_path / "none.pth")
    with pytest.raises(FileNotFoundError, match=r"pretrained .*none.pth: no such file"):
        SlideEncoder(pretrained=str(tmp_path / "none.pth"))
    (tmp_path / "short.pth").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ValueError, match="cannot be read as torch weights"):
        SlideEncoder.from_gigapath(tmp_path / "short.pth")


def test_sizes_that_differ(tmp_path):
    torch.save(encoder().released_state_dict(), tmp_path / "x.pth")
    model = SlideEncoder(**{**SIZES, "depth": 3, "feature_dim": 10, "pretrained": str(tmp_path / "x.pth")})
    with pytest.raises(ValueError, match="feature_dim=12 there and 10 here, depth=2 there and 3 here"):
        model.configure_model()


def test_names_there_and_back(tmp_path):
    """Weights stored under a release's names or under our names load bit for bit, except the head."""
    model = encoder(task="classification", num_classes=3)
    state = model.released_state_dict()
    assert sorted(state) == sorted(sum(released_parameters(2).values(), ()))
    run = {"state_dict": model.state_dict(), "epoch": 1}
    for i, stored in enumerate((state, {"model": state}, run)):
        torch.save(stored, tmp_path / f"{i}.pth")
        twin = SlideEncoder(**SIZES, pretrained=str(tmp_path / f"{i}.pth"), task="classification", num_classes=3)
        twin.configure_model()
        named = dict(twin.double().named_parameters())
        for name, p in model.named_parameters():
            same = torch.equal(named[name], p.float().double())
            assert same != name.startswith("head."), name


def test_lora_apart_from_the_weights_is_named(tmp_path):
    state = encoder().state_dict()
    state["transformer.blocks.0.ffn.fc1.base_layer.weight"] = state.pop("transformer.blocks.0.ffn.fc1.weight")
    torch.save(state, tmp_path / "it.pth")
    with pytest.raises(ValueError, match=r"it\.pth holds LoRA's updates apart.*merge_lora\(\)"):
        encoder(pretrained=str(tmp_path / "it.pth")).configure_model()
