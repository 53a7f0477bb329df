"""Every `lightning-dilated` command in README, docs and recipes parses: its options exist and their values fit.

This file only parses, so it also covers commands for GPUs. Commands are run by tests/test_tutorials.py and other tests
of this folder.
"""

import argparse
import contextlib
import io
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lightning_dilated._extensions import COMMANDS as EXTENSIONS
from lightning_dilated.cli.main import main

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "recipes/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*.yaml")),
]
BLOCK = re.compile(r'^ *```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^ *```$', re.M | re.S)
INLINE = re.compile(r"`(lightning-dilated \w+ [^`]*--[^`]*)`")
START = re.compile(r"(?:^\s*|&& )(lightning-dilated (?!COMMAND).+?)(?= &&|;|$)", re.M)
#: a command with a quoted argument that continues on the next line
OPEN = re.compile(r"^(lightning-dilated [^'\n]*(?:'[^'\n]*'[^'\n]*)*'[^'\n]*)\n", re.M)
#: commands that tests/cli/test_recipes.py runs
RUN = re.compile(r"lightning-dilated fit --config recipes/\w+\.yaml( *#.*)?")
#: pattern of a placeholder for a reader's file -> replacement in this test
PLACES = {
    r"\b(NAME|RECIPE|recipe)\.yaml": "quickstart.yaml",
    r"runs/fold\$k/\S+config\.yaml|RUN/config\.yaml": "slide_finetune.yaml",
    r"runs/(\w+)/\S+config\.yaml": r"\1.yaml",  # the config of a run has the keys of its recipe
    r"\$k\b": "1",
    r"--devices R\b": "--devices 2",
    r"^(lightning-dilated predict) --ckpt_path genome.ckpt": r"\1 --model LongNetMLM",  # a checkpoint selects its class
}


def shown(page: Path) -> list[str]:
    """Return the text that may contain commands: shell blocks and inline code of a page, or comments of a recipe."""
    text = page.read_text()
    if page.suffix == ".yaml":
        text = "\n".join(re.sub(r"^# *", "", line) for line in text.splitlines() if line.startswith("#"))
        text = text.replace("\\\n", "")
        while text != (text := OPEN.sub(r"\1 ", text)):
            pass
        return [text]
    blocks = [x["text"] for x in BLOCK.finditer(text) if x["language"] in ("", "bash", "console") and not x["title"]]
    return blocks + [re.sub(r"\s+", " ", x) for x in INLINE.findall(BLOCK.sub("", text))]


def commands() -> dict[str, Path]:
    """Return {command: the first page that contains it}."""
    listed: dict[str, Path] = {}
    for page in PAGES:
        for text in shown(page):
            for command in START.findall(re.sub(r"\\\n\s*", "", text)):
                if page.suffix != ".yaml" or not RUN.fullmatch(command):
                    listed.setdefault(command.strip(), page)
    return listed


COMMANDS = commands()


class Parsed(Exception):
    """Raised once the arguments of a command are accepted."""


def stop_after_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make argparse parsers raise `Parsed` instead of returning the arguments."""
    parse, depth = argparse.ArgumentParser.parse_known_args, 0

    def known(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            result = parse(self, *args, **kwargs)
        finally:
            depth -= 1
        if depth:  # a subcommand's parser, called by the main parser
            return result
        raise Parsed

    def whole(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        nonlocal depth
        depth += 1
        try:
            _, unknown = parse(self, *args, **kwargs)
        finally:
            depth -= 1
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", known)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", whole)


def parse_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command. Raise AssertionError with the program's message if it is refused."""
    for pattern, value in PLACES.items():
        command = re.sub(pattern, value, command)
    argv = shlex.split(command, comments=True)[1:]
    if argv[0] in EXTENSIONS:
        stop_after_parsing(monkeypatch)
    else:
        for at in reversed([i for i, word in enumerate(argv) if word == "--ckpt_path"]):
            del argv[at : at + 2]  # parsing would read the file
        argv.append("--print_config")
    monkeypatch.setattr(sys, "argv", ["lightning-dilated", *argv])
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main(argv)
        except Parsed:
            return
        except SystemExit as end:
            assert not end.code, text.getvalue()[-2000:]
    assert argv[0] not in EXTENSIONS, f"{argv[0]} ran"


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_command_is_parsed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for block in BLOCK.finditer(COMMANDS[command].read_text()):  # files that the page asks the reader to write
        if block["title"]:
            path = tmp_path / block["title"]
            path.parent.mkdir(exist_ok=True)
            path.write_text(block["text"])
    parse_command(command, monkeypatch)


YAML = {
    x["text"]: page.name
    for page in PAGES
    for x in (BLOCK.finditer(page.read_text()) if page.suffix == ".md" else ())
    if x["language"] == "yaml" and not x["title"] and page.name != "loggers.md"  # see tests/callbacks/test_loggers.py
}


@pytest.mark.parametrize("text", YAML, ids=YAML.values())
def test_documented_yaml_is_parsed(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.yaml").write_text(text)
    parse_command("lightning-dilated fit --config longest.yaml --config block.yaml", monkeypatch)


@pytest.mark.parametrize(
    "command",
    [
        "lightning-dilated plan --config quickstart.yaml --gpuss 4",
        "lightning-dilated fit --config quickstart.yaml --data.seq_length 16",
        "lightning-dilated fit --config quickstart.yaml --data.seq_len many",
        "lightning-dilated fit --config none.yaml",
        "lightning-dilated bench links --no_such 1",
    ],
)
def test_commands_with_mistakes_are_seen(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError):
        parse_command(command, monkeypatch)


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 50
    assert {"plan", "fit", "score", "export", "verify"} < {command.split()[1] for command in COMMANDS}
