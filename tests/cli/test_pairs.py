"""`pairs`, then `fit` with what it printed; and what it refuses in one line."""

import shlex

import pytest

from .conftest import TRAINER

pytestmark = pytest.mark.full


@pytest.fixture
def trees(tmp_path):
    for version in ("old", "new"):
        for folder in ("fs", "drivers"):
            (tmp_path / version / folder).mkdir(parents=True)
            for number in range(20):
                text = f"{folder} {number} of the {version} tree\n" * (3 + number % 3)
                (tmp_path / version / folder / f"{number}.c").write_text(text)
    return tmp_path


def test_what_is_printed_trains(cli, trees):
    printed = cli("pairs", "--old", "old", "--new", "new", "--out", "p.bin", "--seq_len", 128, "--hold_out", "fs",
               "--suffixes", ".c", "--changed_only")  # fmt: skip
    assert printed.code == 0, printed.err
    lines = printed.out.splitlines()
    assert lines[0] == "40 files in both trees, of which 40 differ"
    sizes = [(trees / name).stat().st_size // 128 for name in ("p.bin", "p.val.bin")]
    assert lines[1:3] == [
        f"p.bin: {sizes[0]} samples of 128 bytes (train)",
        f"p.val.bin: {sizes[1]} samples of 128 bytes (val)",
    ]
    arguments = shlex.split(lines[-1].removeprefix("train on it: "))
    pattern = ["--model.pattern", '{"segment_lengths": [16], "dilation_rates": [1]}', "--model.dim", "16"]
    fitted = cli("fit", "--config", "quickstart.yaml", *arguments, *pattern, "--model.depth", "1", *TRAINER)
    assert fitted.code == 0, fitted.err[-2000:]


def test_one_line_of_error(cli, trees):
    result = cli("pairs", "--old", "old", "--new", "gone", "--out", "p.bin")
    assert result.code == 2 and result.err == "lightning-dilated: error: new gone: there is no such folder\n"
