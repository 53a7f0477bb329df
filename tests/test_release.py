"""A release: equal versions, a changelog, and archives that install and build the site outside of the checkout."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

import lightning_dilated as ld

from .test_site import HOOKS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: kinds of changes in Keep a Changelog
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def versions() -> dict[str, list[str]]:
    """Return {heading of a version: kinds of its changes} from the changelog, the newest version first."""
    parts = re.split(r"^## (.+)\n", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    return {title: re.findall(r"^### (.+)$", text, re.M) for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["project"]["version"] == ld.__version__ == str(citation["version"])
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert f"[{ld.__version__}] - {citation['date-released']}" == list(versions())[1]


def test_changelog_names_each_kind_once_a_version() -> None:
    titles = list(versions())
    assert titles[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", title) for title in titles[1:])
    for title, kinds in versions().items():
        assert set(kinds) <= KINDS and set(Counter(kinds).values()) <= {1}, title


def test_source_archive_has_what_the_site_and_tests_need() -> None:
    included = set(PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    needed = {"mkdocs.yml", "constraints.txt", "docs", "tests", "pyproject.toml", *HOOKS.linked_files(ROOT)}
    # hatchling itself adds pyproject.toml
    assert {path.split("/")[0] for path in needed} - included == {"pyproject.toml"}


# -- the archives themselves -------------------------------------------------------------------------------------------
def run(*argv: str | Path, cwd: Path) -> str:
    """Return the output of a program that runs in `cwd` and does not find this checkout."""
    names = {"PYTHONPATH", "VIRTUAL_ENV"}
    environment = {k: v for k, v in os.environ.items() if k not in names} | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{argv}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return {"wheel" or "sdist": file}, built from this checkout."""
    pytest.importorskip("build", reason="needs the extra dev")
    pytest.importorskip("twine", reason="needs the extra dev")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, cwd=ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir(), cwd=folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_archive_installs_and_runs_without_the_checkout(kind: str, archives: dict[str, Path], tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    programs = tmp_path / "venv" / "bin"
    run(programs / "python", "-m", "pip", "install", "-c", ROOT / "constraints.txt", archives[kind], cwd=tmp_path)
    assert run(programs / "lightning-dilated", "--version", cwd=tmp_path) == f"lightning-dilated {ld.__version__}\n"
    printed = run(programs / "lightning-dilated", "fit", "--config", "quickstart.yaml", "--print_config", cwd=tmp_path)
    assert yaml.safe_load(printed)["model"]["class_path"].endswith("LongNetLM")


@pytest.mark.slow
def test_site_builds_from_the_source_archive(archives: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    with tarfile.open(archives["sdist"]) as file:
        file.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    run(sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", tmp_path / "site", cwd=source)
    assert (tmp_path / "site" / "tutorials" / "first_model" / "index.html").is_file()
