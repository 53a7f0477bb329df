"""`export`: a checkpoint's model as a file, with its inputs named, and refusals in one line."""

import re

import pytest

pytestmark = pytest.mark.full


@pytest.mark.slow
def test_onnx(cli, fitted):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    result = cli("export", "--ckpt_path", fitted.ckpt, "--out", "model.onnx", "--max_len", 40)
    assert result.code == 0, result.err
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
