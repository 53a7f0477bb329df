"""Every benchmark script starts: `--help` prints its options."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = sorted(path for path in ROOT.rglob("*.py") if 'if __name__ == "__main__"' in path.read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_help(path, monkeypatch, capsys):
    before = set(sys.modules)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.syspath_prepend(str(path.parent))
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
    finally:
        for name in set(sys.modules) - before:  # modules in different folders have the same name
            if str(ROOT) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out
