"""Released LongViT weights: recorded outputs reproduced, every name and shape loaded, what is missing named."""

import argparse
from pathlib import Path

import pytest
import torch

from lightning_dilated import LongViT, SlideEncoder
from lightning_dilated.ext.slides.longvit import weights as longvit_weights

from .images import CASES, DATA, equal, load, state


@pytest.mark.parametrize("case", CASES)
def test_recorded_outputs(case, tmp_path):
    equal(load(tmp_path, state(), case), case)
    tuned = load(tmp_path, {"module": state("finetuned")}, case, task="classification", num_classes=3)
    equal(tuned, case, "finetuned_embedding")
    with torch.no_grad():
        image = CASES[case]["image"].float()
        torch.testing.assert_close(tuned.head(tuned(image)), CASES[case]["finetuned_logits"], rtol=0, atol=1e-5)
        if "tokens" in CASES[case]:
            torch.testing.assert_close(tuned.hidden_states(image), CASES[case]["tokens"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_exact_mode_differs_where_pads_were_attended(case, tmp_path):
    with torch.no_grad():
        got = load(tmp_path, state(), case, compat=False)(CASES[case]["image"].float())
    error = (got - CASES[case]["pretrained_embedding"]).abs().max()
    assert (error < 1e-5) == case.startswith("trained_size")


def test_every_name_and_shape_of_the_release(tmp_path):
    shapes = DATA["small_patch32_1024"]
    torch.save({k: torch.zeros(v, dtype=torch.int8) for k, v in shapes.items()}, tmp_path / "small.pth")
    file = longvit_weights.read_longvit(tmp_path / "small.pth")
    stock = LongViT(norm_at="patches")
    assert file.sizes() == {name: getattr(stock, name) for name in file.sizes()}
    with torch.device("meta"):
        stock.configure_model()
    named = {**file.encoder, **file.norms["patches"]}
    assert {name: file.tensor(of).shape for name, of in named.items()} == {
        name: p.shape for name, p in stock.named_parameters()
    }
    assert sorted(x for of in named.values() for x in of) == sorted(shapes)


def test_a_table_resized_at_loading(tmp_path):
    want = DATA["resized_at_loading"]
    model = load(tmp_path, state(), image_size=want["image_size"])
    torch.testing.assert_close(model.pos_embed, want["table"].float(), rtol=2**-11, atol=1e-6)  # theirs is rounded
    assert model.image_size == 40


def prefixed(prefix, stored):
    return {f"{prefix}{k}": v for k, v in stored.items()}


DINO = {"head.mlp.0.weight": torch.ones(2, 64), "head.last_layer.weight_g": torch.ones(2, 1)}
SETTINGS = argparse.Namespace(arch="vit_small", lr=0.1)
LAYOUTS = {
    "bare": (lambda: state(), []),
    "model": (lambda: {"model": state()}, []),
    "float32": (lambda: {k: v.float() for k, v in state().items()}, []),
    "DINO": (
        lambda: {
            "student": {"x": torch.ones(1)},
            "teacher": {**prefixed("backbone.", state()), **DINO},
            "args": SETTINGS,
            "epoch": 3,
        },
        list(DINO),
    ),
    "DINO in DDP": (lambda: {"teacher": prefixed("module.backbone.", state())}, []),
    "mask token, relative bias": (
        lambda: {
            **state(),
            "mask_token": torch.zeros(1, 1, 64),
            "encoder.relative_position.relative_attention_bias.weight": torch.zeros(32, 16),
        },
        ["mask_token", "encoder.relative_position.relative_attention_bias.weight"],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(longvit_weights, "rank_zero_info", told.append)
    make, extra = LAYOUTS[name]
    equal(load(tmp_path, make()), "ragged")
    assert len(told) == bool(extra) and all(x in told[0] for x in extra)
    assert not extra or f"{len(extra)} entries" in told[0]


def test_a_file_of_an_old_torch(tmp_path):
    torch.save(state(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    told = {x: CASES["ragged"][x] for x in ("segment_lengths", "dilation_rates")}
    equal(LongViT.from_longvit(tmp_path / "old.pth", **told), "ragged")


NORMS = {
    "as the authors fine-tune": ("pretrained", {"norm_at": "mean"}, 1e-5, "norm.bias, norm.weight"),
    "pretrained": ("pretrained", {}, 1e-6, None),
    "fine-tuned": (
        "finetuned",
        {"task": "classification", "num_classes": 2},
        1e-5,
        "head.bias, head.weight",
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_which_norm_and_head(name, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(longvit_weights, "rank_zero_info", told.append)
    kind, options, eps, extra = NORMS[name]
    model = load(tmp_path, state(kind), **options)
    assert model.norm.eps == eps and (told == [] if extra is None else extra in told[0])
    fresh = torch.equal(model.norm.weight, torch.ones(64))
    assert fresh == (name == "as the authors fine-tune")


def without(*names, kind="pretrained"):
    return {k: v for k, v in state(kind).items() if k not in names}


def having(**more):
    return {**state(), **{k.replace("__", "."): v for k, v in more.items()}}


LOST = "encoder.layers.1.self_attn.q_proj.bias"
BAD = {
    "missing": (lambda: without(LOST), {}, rf"release.pth lacks 1 of 43 parameters of a LongViT: {LOST}\."),
    "no sub-layer norms": (
        lambda: {k: v for k, v in state().items() if "inner_attn_ln" not in k and "ffn_layernorm" not in k},
        {},
        "lacks 8 of 43 parameters",
    ),
    "no layers": (lambda: {k: v for k, v in state().items() if "layers" not in k}, {}, "lacks 20 of 23 parameters"),
    "no positions": (lambda: without("pos_embed"), {}, "is no LongViT: no single pos_embed"),
    "two models": (lambda: having(x__pos_embed=torch.ones(1)), {}, "no single pos_embed"),
    "class token": (
        lambda: having(cls_token=torch.zeros(1, 1, 64)),
        {},
        "parts that a LongViT does not compute: cls_token. GigaPath's .*from_gigapath",
    ),
    "a norm in the encoder": (
        lambda: having(encoder__layer_norm__weight=torch.ones(64)),
        {},
        "does not compute: encoder.layer_norm.weight",
    ),
    "features, no pixels": (
        lambda: having(patch_embed__proj__weight=torch.ones(64, 48)),
        {},
        r"proj.weight is \(64, 48\), but a LongViT embeds square patches",
    ),
    "no square table": (lambda: having(pos_embed=torch.ones(1, 65, 64)), {}, r"pos_embed is \(1, 65, 64\)"),
    "a bias of another size": (
        lambda: having(encoder__layers__0__ffn__fc2__bias=torch.ones(3)),
        {},
        r"encoder.layers.0.ffn.fc2.bias is \(3,\), but the other tensors say that it is \(64,\)",
    ),
    "no norm at all": (
        lambda: without("norm.weight", "norm.bias"),
        {},
        'has no norm.weight and norm.bias.*norm_at="mean", which begins with a fresh norm',
    ),
    "the other norm": (lambda: state("finetuned"), {"norm_at": "patches"}, 'norm_at="mean", as it was fine-tuned'),
    "other sizes": (
        state,
        {"ffn_dim": 8},
        "does not fit this model: ffn_dim=256 there and 8 here",
    ),
    "no weights": (
        lambda: {"model": "none"},
        {},
        "holds no weights: expected a state dict, bare or under one of teacher",
    ),
    "heads": (state, {"num_heads": 5}, "num_heads=5 must divide dim=64"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name, tmp_path):
    make, options, says = BAD[name]
    with pytest.raises(ValueError, match=says):
        load(tmp_path, make(), **options)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none.pth: no such file"):
        LongViT.from_longvit(tmp_path / "none.pth")
    with pytest.raises(FileNotFoundError, match=r"pretrained .*none.pth: no such file"):
        LongViT(pretrained=str(tmp_path / "none.pth"))
    (tmp_path / "short.pth").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ValueError, match="cannot be read as torch weights"):
        LongViT.from_longvit(tmp_path / "short.pth")
    torch.save({"model": state(), "code": Path("x")}, tmp_path / "code.pth")
    with pytest.raises(ValueError, match="cannot be read as torch weights"):
        LongViT.from_longvit(tmp_path / "code.pth")
    torch.save({"model": state()}, tmp_path / "vit.pth")
    with pytest.raises(ValueError, match=r"no single cls_token.*LongViT.from_longvit loads a LongViT"):
        SlideEncoder.from_gigapath(tmp_path / "vit.pth")


def test_half_precision_stays_near(tmp_path):
    equal_to = load(tmp_path, state()).bfloat16()
    with torch.no_grad():
        got = equal_to(CASES["ragged"]["image"].float())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), CASES["ragged"]["pretrained_embedding"], rtol=0, atol=0.1)
