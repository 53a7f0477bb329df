"""Incomplete, damaged or forged weight files: each raises an error that names the file."""

import json

import pytest
import torch

from lightning_dilated import LongNetLM, SlideEncoder
from lightning_dilated.ext.export import torchscale
from lightning_dilated.ext.slides.weights import to_released

from ..ext.slides.slides import SIZES, encoder
from . import PATTERN


def slide_state():
    return to_released(encoder(dtype=torch.float32).state_dict())


def decoder_state(depth=2, dim=8, hidden=16):
    shapes = {"embed_tokens.weight": (11, dim), "output_projection.weight": (11, dim)}
    shapes |= {f"layer_norm.{kind}": (dim,) for kind in ("weight", "bias")}
    sizes = {
        "ffn.fc1": (hidden, dim),
        "ffn.fc2": (dim, hidden),
        "self_attn_layer_norm": (dim,),
        "final_layer_norm": (dim,),
    }
    sizes |= {f"self_attn.{x}_proj": (dim, dim) for x in ("q", "k", "v", "out")}
    for i in range(depth):
        for name, shape in sizes.items():
            shapes |= {f"layers.{i}.{name}.weight": shape, f"layers.{i}.{name}.bias": shape[:1]}
    return {name: torch.ones(shape) for name, shape in shapes.items()}


def from_gigapath(path, **options):
    own = {k: SIZES[k] for k in ("num_heads", "grid", "segment_lengths", "dilation_rates")}
    return SlideEncoder.from_gigapath(path, **{**own, **options})


def from_torchscale(path, **options):
    return LongNetLM.from_torchscale(path, [4, 8], [1, 2], num_heads=2, **options)


#: loading function, contents of a valid file, prefix of the layers' names, name of a matrix
LOADERS = {
    "gigapath": (from_gigapath, slide_state, "encoder.layers", "patch_embed.proj.weight"),
    "torchscale": (from_torchscale, decoder_state, "layers", "embed_tokens.weight"),
}
each = pytest.mark.parametrize("name", LOADERS)


def loading(folder, name, change, **options):
    """Change valid weights, save and load them. `change` returns the new weights, or None if it works in place."""
    load, make, layers, matrix = LOADERS[name]
    state = {k: x.clone() for k, x in make().items()}
    changed = change(state, layers, matrix)
    torch.save(state if changed is None else changed, folder / "x.pth")
    return load(folder / "x.pth", **options)


def put(key, value):
    return lambda state, layers, matrix: state.update({key.format(layers=layers, matrix=matrix): value})


def spoil(value, key="{matrix}"):
    def change(state, layers, matrix):
        state[key.format(layers=layers, matrix=matrix)].flatten()[1] = value

    return change


def only(value):
    return lambda state, layers, matrix: value


def cut(state, layers, matrix):
    """Remove the last layer from the weights."""
    return {k: x for k, x in state.items() if not k.startswith(f"{layers}.1.")}


WRONG = {
    "layers without end": (put("{layers}.99999999999.x", torch.ones(1)), "names layer 99999999999, but has"),
    "many layers": (put("{layers}.100000000.x", torch.ones(1)), "names layer 100000000, but has"),
    "no number": (put("{layers}." + "9" * 5000 + ".x", torch.ones(1)), "names layer 99999999999999999999, but has"),
    "rows without end": (
        put("{matrix}", torch.ones(1, 1).expand(10**12, 8)),
        r"declares the shape \(1000000000000, 8\)",
    ),
    "a large bias": (put("{layers}.1.ffn.fc1.bias", torch.ones(1).expand(10**12)), "declares the shape"),
    "a wide layer": (put("{layers}.0.ffn.fc1.weight", torch.ones(9, 8)), r"x\.pth: .* the other tensors say"),
    "integer keys": (only({0: torch.ones(1)}), "names a tensor 0, but names are strings"),
    "no values": (put("{matrix}", torch.empty(3, device="meta")), "is on the meta device"),
    "NaN": (spoil(torch.nan), r"holds NaN or infinite values in 1 of \d+ tensors"),
    "infinity": (spoil(torch.inf), r"holds NaN or infinite values in 1 of \d+ tensors"),
}


@each
@pytest.mark.parametrize("what", WRONG)
def test_refused(tmp_path, name, what):
    change, says = WRONG[what]
    with pytest.raises(ValueError, match=says) as raised:
        loading(tmp_path, name, change)
    assert "x.pth" in str(raised.value)


@each
def test_layers_that_were_asked_for(tmp_path, name):
    """A file does not show that its last layer is missing, but the caller may give the number of layers."""
    loading(tmp_path, name, cut)
    with pytest.raises(ValueError, match=r"x\.pth has 1 layers, and depth=2 was asked for"):
        loading(tmp_path, name, cut, depth=2)
    loading(tmp_path, name, cut, depth=1)
    loading(tmp_path, name, lambda *_: None)


def test_layers_of_gigapath(tmp_path):
    """For a published width, the number of layers is known."""
    model = SlideEncoder(feature_dim=384, dim=384, ffn_dim=8, depth=11)
    torch.save(to_released(model.state_dict()), tmp_path / "x.pth")
    with pytest.raises(ValueError, match=r"x\.pth has 11 layers, and GigaPath's encoder of its width has 12.*depth=11"):
        SlideEncoder.from_gigapath(tmp_path / "x.pth")
    assert SlideEncoder.from_gigapath(tmp_path / "x.pth", depth=11).depth == 11


def test_own_weights_too(tmp_path):
    good = encoder(dtype=torch.float32).state_dict()
    for key, x, says in (
        ("transformer.blocks.99999999999.x", torch.ones(1), "names layer 99999999999"),
        ("transformer.blocks.1.ffn.fc1.weight", torch.ones(9, 8), "the other tensors say"),
        ("patch_embed.weight", torch.ones(3), "do not fit each other"),
    ):
        torch.save({**good, key: x}, tmp_path / "x.pth")
        with pytest.raises(ValueError, match=rf"x\.pth.*{says}|{says}.*x\.pth"):
            from_gigapath(tmp_path / "x.pth")


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_from_pretrained(tmp_path, value):
    pytest.importorskip("safetensors")
    model = LongNetLM(PATTERN, dim=16, depth=1)
    with torch.no_grad():
        next(model.parameters())[0, 0] = value
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match=r"model\.safetensors holds NaN or infinite values in 1 of"):
        LongNetLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["hf_hub:prov-gigapath/prov-gigapath", "prov-gigapath/prov-gigapath"])
def test_names_of_the_hub(name):
    for load in (SlideEncoder.from_gigapath, lambda path: SlideEncoder(pretrained=path)):
        with pytest.raises(FileNotFoundError, match=r"Download it first.*slide_encoder\.pth.*pass its path"):
            load(name)


def test_state_dicts_in_memory():
    """A state dict in memory is not compared with the size of a file."""
    state = decoder_state()
    state["layers.1.ffn.fc1.bias"] = torch.ones(1).expand(16)
    sizes, _ = torchscale.convert(state, num_heads=2)
    assert sizes["depth"] == 2


def test_an_archive_that_grows(tmp_path):
    """An archive that expands is refused, because torch.save does not compress."""
    import zipfile

    with zipfile.ZipFile(tmp_path / "x.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(10_000_000))
    with pytest.raises(ValueError, match=r"x\.pth cannot be read .*declares 10,000,000 bytes of contents, but has"):
        from_gigapath(tmp_path / "x.pth")
