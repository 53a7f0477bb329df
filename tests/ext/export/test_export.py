"""export: graphs of plain torch operations equal the model, files run without this package, and some are refused."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.ext.export import export as module
from lightning_dilated.ext.export.export import decompositions, export, exported_program

pytestmark = pytest.mark.full

MAX_LEN = 60
PATTERN = {"segment_lengths": [8, 64], "dilation_rates": [1, 4]}
SIZES = {"dim": 16, "depth": 1, "num_heads": 4}
MODELS = {
    "causal, gqa, kv_conv": lambda: ld.LongNetLM(PATTERN, num_kv_heads=2, kv_conv=4, **SIZES),
    "hybrid": lambda: ld.LongNetLM(
        {"hybrid": {"local": 16}}, **{**SIZES, "depth": 4}, max_seq_len=MAX_LEN, global_rotary=False
    ),
    "masked, kv_conv": lambda: ld.LongNetMLM(PATTERN, kv_conv=3, **SIZES),
    "tokens": lambda: ld.LongNetClassifier(PATTERN, vocab_size=20, num_classes=3, **SIZES),
    "features": lambda: ld.LongNetClassifier(
        PATTERN, feature_dim=6, task="ordinal", num_classes=3, pool="first", **SIZES
    ),
    "slide": lambda: slide_encoder(task="classification", num_classes=2),
    "slide, attended": lambda: slide_encoder(padding="attended", pool="mean"),
}
#: models in CI, because tracing takes seconds; slow tests export all models
QUICK = ("slide, attended",)
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
#: a script that prints the outputs of a file for inputs in an .npz; it runs without this package
ONNX = """
import sys, numpy as np, onnxruntime
inputs = dict(np.load(sys.argv[2]))
np.savez(sys.argv[3], *onnxruntime.InferenceSession(sys.argv[1]).run(None, inputs))
assert not {"torch", "lightning_dilated"} & set(sys.modules)
"""
PACKAGE = """
import sys, numpy as np, torch, torch._inductor
inputs = [torch.from_numpy(x) for x in np.load(sys.argv[2]).values()]
out = torch._inductor.aoti_load_package(sys.argv[1])(*inputs)
np.savez(sys.argv[3], *[x.numpy() for x in ([out] if isinstance(out, torch.Tensor) else out)])
assert "lightning_dilated" not in sys.modules
"""


def slide_encoder(**options):
    segments = {"segment_lengths": PATTERN["segment_lengths"], "dilation_rates": PATTERN["dilation_rates"]}
    return ld.SlideEncoder(12, 16, 1, 4, grid=20, **segments, **options)


def built(make):
    """Build a model with random weights, in eval mode."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def close(got, want, tol=1e-5):
    largest = max(1.0, want.abs().max().item())
    assert got.shape == want.shape and (got - want).abs().max().item() <= tol * largest


def elsewhere(script, file, inputs, folder):
    """Return the outputs of an exported file in a process that cannot import this package."""
    np.savez(folder / "in.npz", **{name: x.numpy() for name, x in inputs.items()})
    argv = [sys.executable, "-c", script, str(file), str(folder / "in.npz"), str(folder / "out.npz")]
    subprocess.run(argv, check=True, cwd=folder, timeout=300)
    return [torch.from_numpy(x) for x in np.load(folder / "out.npz").values()]


@pytest.mark.parametrize("name", EVERY)
def test_plain_graph(name):
    """The graph works for all lengths up to the largest: below, at and above segment lengths. Longer inputs raise."""
    model = built(MODELS[name])
    with torch.no_grad():
        graph = exported_program(model, MAX_LEN).module()
        for length in (2, 3, 8, 9, 24, 25, 47, MAX_LEN):
            inputs = model.export_inputs(length, 1)
            for got, want in zip(graph(*inputs.values()), model.export_outputs(**inputs).values(), strict=True):
                close(got, want)
        with pytest.raises((IndexError, RuntimeError)):
            graph(*model.export_inputs(MAX_LEN + 1, 1).values())


@pytest.mark.slow
def test_batches_and_double():
    model = built(MODELS["masked, kv_conv"]).double()
    with torch.no_grad():
        graph = exported_program(model, MAX_LEN, batch_size=3).module()
        inputs = model.export_inputs(31, 3)
        close(graph(*inputs.values())[0], model.export_outputs(**inputs)["logits"], 1e-12)


@pytest.mark.slow
def test_own_decomposition():
    """The result of torch.export on a model can be decomposed later."""
    model, tokens = built(MODELS["masked, kv_conv"]), torch.randint(256, (1, 40))
    with torch.no_grad():
        graph = torch.export.export(model, (tokens,)).run_decompositions(decompositions(40))
        close(graph.module()(tokens), model(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal, gqa, kv_conv", "masked, kv_conv", "tokens", "slide"])
def test_onnx_elsewhere(name, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    model = built(MODELS[name])
    exported = export(model, tmp_path / "model.onnx", MAX_LEN)
    assert exported.error <= 1e-5 and exported.checked == (2, 40, MAX_LEN)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    inputs = model.export_inputs(33, 1)
    assert {n: tuple(33 if s == "length" else s for s in shape) for n, (_, shape) in exported.inputs.items()} == {
        n: tuple(x.shape) for n, x in inputs.items()
    }
    with torch.no_grad():
        expected = model.export_outputs(**inputs)
    assert list(exported.outputs) == list(expected)
    for got, want in zip(elsewhere(ONNX, exported.path, inputs, tmp_path), expected.values(), strict=True):
        close(got, want)
    with pytest.raises(subprocess.CalledProcessError):
        elsewhere(ONNX, exported.path, model.export_inputs(MAX_LEN + 1, 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal, gqa, kv_conv", "masked, kv_conv", "tokens", "slide"])
def test_package_elsewhere(name, tmp_path):
    model = built(MODELS[name])
    exported = export(model, tmp_path / "model.pt2", MAX_LEN)
    assert exported.error <= 1e-5
    inputs = model.export_inputs(33, 1)
    with torch.no_grad():
        expected = model.export_outputs(**inputs)
    for got, want in zip(elsewhere(PACKAGE, exported.path, inputs, tmp_path), expected.values(), strict=True):
        close(got, want)
    with pytest.raises(subprocess.CalledProcessError):
        elsewhere(PACKAGE, exported.path, model.export_inputs(MAX_LEN + 1, 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_released_size(suffix, tmp_path):
    """With random weights of GigaPath's size (12 layers, 768 features) and its pattern, fp32 outputs agree to 1e-4."""
    if suffix == ".onnx":
        pytest.importorskip("onnxruntime")
    model = built(lambda: ld.SlideEncoder(padding="attended"))
    exported = export(model, tmp_path / f"model{suffix}", 3000)
    assert exported.error <= 1e-4
    inputs = model.export_inputs(1500, 1)
    with torch.no_grad():
        want = model.export_outputs(**inputs)["embeddings"]
    script = ONNX if suffix == ".onnx" else PACKAGE
    close(elsewhere(script, exported.path, inputs, tmp_path)[0], want, 1e-4)


@pytest.mark.slow
def test_a_file_that_differs_is_not_written(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    model = built(MODELS["tokens"])
    write = module._write_onnx

    def wrong(*args):
        run = write(*args)
        return lambda tensors: [x + 0.01 for x in run(tensors)]

    monkeypatch.setattr(module, "_write_onnx", wrong)
    with pytest.raises(ValueError, match=r"was not written: its embeddings differs"):
        export(model, tmp_path / "model.onnx", MAX_LEN)
    assert list(tmp_path.iterdir()) == []


def test_compiled_blocks_stay_compiled():
    from lightning_dilated.ext._compat.torch import compiled_call

    model = built(lambda: ld.LongNetClassifier(PATTERN, vocab_size=20, num_classes=3, compile_blocks=True, **SIZES))
    block = model.transformer.blocks[0]
    before = compiled_call(block)
    with module._uncompiled(model):
        assert before is not None and compiled_call(block) is None
    assert compiled_call(block) is before


REFUSED = {
    "suffix": (lambda: built(MODELS["tokens"]), "m.bin", 8, r"\.onnx .* or \.pt2"),
    "training": (lambda: built(MODELS["tokens"]).train(), "m.pt2", 8, "eval mode"),
    "class": (lambda: ld.SlidePretrainer(dim=16, depth=1, num_heads=4).eval(), "m.pt2", 8, "SlidePretrainer cannot be"),
    "length": (lambda: built(MODELS["tokens"]), "m.pt2", 1, "max_len must be"),
    "xpos": (
        lambda: ld.LongNetLM(PATTERN, position_encoding="xpos", **SIZES).eval(),
        "m.pt2",
        8,
        "xpos' cannot be exported",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, tmp_path):
    make, name, max_len, words = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=words):
        export(make(), tmp_path / name, max_len)
    assert list(tmp_path.iterdir()) == []


def test_refuses_libraries_that_lack(tmp_path, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-dilated\[export\]"):
        export(built(MODELS["tokens"]), tmp_path / "m.onnx", 8)
