"""`export` writes a checkpoint's model to a file with named inputs, or refuses with an error of one line."""

import re

import pytest

from lightning_dilated.ext.export.command import summary
from lightning_dilated.ext.export.export import Exported

pytestmark = pytest.mark.full


@pytest.mark.slow
def test_onnx(cli, fitted):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    result = cli("export", "--ckpt_path", fitted.ckpt, "--out", "model.onnx", "--max_len", 40).ok()
    assert "length from 2 to 40" in result.words and "input tokens: int64 (1, length)" in result.words
    assert "output logits: float32 (1, length, 256)" in result.words
    assert float(re.search(r"lengths 2, 26, 40: largest difference (\S+)", result.words)[1]) < 1e-5
    session = onnxruntime.InferenceSession(result.folder / "model.onnx")
    assert [x.name for x in session.get_inputs()] == ["tokens"]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--out", "model.pt"], r"model\.pt must end in \.onnx"),
        (["--out", "model.pt2", "--max_len", "1"], "max_len must be"),
    ],
)
def test_refusals(cli, fitted, options, words):
    result = cli("export", "--ckpt_path", fitted.ckpt, *options)
    assert result.code == 2 and re.search(words, result.err) and len(result.err.splitlines()) == 1


def test_no_such_checkpoint(cli):
    result = cli("export", "--ckpt_path", "x.ckpt", "--out", "model.onnx")
    assert result.code == 2 and "x.ckpt: no such file" in result.err


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize("names", [["logits"], ["embeddings", "logits"]])
def test_the_line_that_runs_the_file_takes_the_outputs_apart(tmp_path, suffix, names):
    path = tmp_path / f"model{suffix}"
    path.touch()
    inputs = {"tokens": ("int64", (1, "length"))}
    line = summary(Exported(path, inputs, {x: ("float32", (1, 2)) for x in names}, 8, (2, 8), 0.0)).splitlines()[-1]
    assert line.startswith("  logits, = " if len(names) == 1 else "  embeddings, logits = ")
