"""Run the command line in this process, in a test's own folder, and train one tiny checkpoint for all tests."""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_dilated.cli.main import main
from lightning_dilated.ext.profiling import verify
from lightning_dilated.pattern import DilatedPattern

from ..distributed import forked

SEQ_LEN = 64
DATA = ["--data.paths", "text.txt", "--data.seq_len", str(SEQ_LEN), "--data.batch_size", "2", "--data.val_limit", "2"]
MODEL = ["--model.dim", "16", "--model.depth", "2"]
TRAINER = [
    *("--trainer.max_steps", "3", "--trainer.val_check_interval", "3", "--trainer.log_every_n_steps", "1"),
    *("--trainer.logger.save_dir", "runs"),
]
#: the quickstart at a size for tests
TINY = ["--config", "quickstart.yaml", *DATA, *MODEL, *TRAINER]
LOG = Path("runs") / "quickstart" / "version_0"


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omit the picture of a pattern, which takes half of a small fit's time. tests/callbacks/test_report.py tests it."""
    monkeypatch.setattr(DilatedPattern, "plot", lambda self, length, heads, causal, path, **options: Path(path).touch())


@dataclass
class Result:
    """Exit status, output and working folder of a command."""

    code: int
    out: str
    err: str
    folder: Path

    def ok(self) -> "Result":
        """Return this result, after checking that the command succeeded."""
        assert self.code == 0, self.err + self.out
        return self

    @property
    def words(self) -> str:
        """Return standard output with one space between words in place of a table's spaces and line breaks."""
        return " ".join(self.out.split())

    def metric(self, name: str) -> float:
        """Return a number from the table that Lightning prints after validate and test."""
        (row,) = (line for line in self.out.splitlines() if line.split("│")[1:2] and line.split("│")[1].strip() == name)
        return float(row.split("│")[2])


def run_in(folder: Path, *argv: str, stdin: str = "") -> Result:
    """Run `lightning-dilated ARGV` in `folder`. An uncaught exception gives a traceback on stderr and the status 1."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before = os.getcwd(), sys.argv, sys.stdin, dict(os.environ)
    os.chdir(folder)
    sys.argv, sys.stdin = ["lightning-dilated", *argv], io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as stop:
                code = stop.code or 0
            except Exception:
                traceback.print_exc()
                code = 1
    finally:
        os.chdir(before[0])
        sys.argv, sys.stdin = before[1:3]
        os.environ.clear()
        os.environ.update(before[3])
    return Result(code, out.getvalue(), err.getvalue(), folder)


def write_text(folder: Path) -> None:
    """Write a file of 8000 bytes with some structure."""
    (folder / "text.txt").write_bytes(bytes(97 + (i * i) % 26 for i in range(8000)))


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., Result]:
    """Run a command line in a folder that contains text.txt."""
    write_text(tmp_path)
    return lambda *argv, **options: run_in(tmp_path, *map(str, argv), **options)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks of `verify` and `bench links`. `test_two_ranks_agree` also starts interpreters, as users do."""
    monkeypatch.setattr(verify, "mp", SimpleNamespace(get_context=lambda method: forked.context()))


@dataclass
class Fitted:
    """A run that all tests may read: the result of the command, its log folder and its checkpoint."""

    result: Result
    log: Path
    ckpt: Path


@pytest.fixture(scope="session")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """Run `fit` with TINY once for the session."""
    folder = tmp_path_factory.mktemp("fitted")
    write_text(folder)
    torch.manual_seed(0)
    result = run_in(folder, "fit", *TINY)
    assert result.code == 0, result.err
    return Fitted(result, folder / LOG, folder / LOG / "checkpoints" / "last.ckpt")
