"""README and docs are correct: Python runs, links exist, commands parse, and tables contain real names."""

import ast
import re
from pathlib import Path

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated._extensions import COMMANDS
from lightning_dilated.attention.backends import ENGINES
from lightning_dilated.cli.lightning_cli import DilatedCLI

from .distributed.forked import run_ranks

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
PAGES |= {Path(name): (ROOT / name).read_text() for name in ("ARCHITECTURE.md", "CONTRIBUTING.md")}
TEXT = "\n".join(PAGES.values())
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
FENCES = re.compile(r'^ *```(\w*)(?: title="([^"]+)")?\n(.*?)^ *```$', re.M | re.S)
#: a line in a block without a language: a command, its continuation, or a word of a loop
COMMAND = re.compile(r"(  |lightning-dilated |python |pip |mkdocs |git |sbatch |lm_eval |for |done$|\.ci/)")
#: parts of blocks that have their own tests
OF_THEIR_OWN = {"class Tagger", "torchrun"}


def block(words: str) -> str:
    """Return the only Python block that contains these words."""
    (text,) = {b for b in BLOCKS if words in b}
    return text


def test_every_block_is_run_or_parsed() -> None:
    """`python` blocks run below, `bash` and files in test_tutorials.py. Commands and `yaml` parse in tests/cli."""
    pages = [*PAGES, *(path.relative_to(ROOT) for path in ROOT.glob("docs/*/*.md")), Path("recipes/README.md")]
    for page in [*pages, Path("SECURITY.md")]:
        tutorial = page.parent.name == "tutorials"
        for language, _, text in FENCES.findall((ROOT / page).read_text()):
            if language == "py":  # needs files or hardware that tests lack
                compile(text, str(page), "exec")
            elif language == "":
                assert not [line for line in text.splitlines() if not COMMAND.match(line)], (page, text)
            elif language == "python":
                assert tutorial or text in BLOCKS, (page, text)
            else:
                assert language in (("bash", "console", "text", "yaml") if tutorial else ("text", "yaml")), page


@pytest.mark.parametrize("text", sorted({b for b in BLOCKS if not any(words in b for words in OF_THEIR_OWN)}))
def test_block_runs(text: str) -> None:
    if "import transformers" in text or "integrations.transformers" in text:
        pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
    if "lora=" in text:
        pytest.importorskip("peft", reason="needs the extra lora")
    exec(text, {"__name__": "block"})


def test_block_of_the_op_prints(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    exec(block("num_heads=8, depth=4, causal=True"), scope)
    assert scope["out"].shape == (1, 4096, 8, 64)
    assert scope["q"].grad is not None
    assert "keys a row" in capsys.readouterr().out


def test_first_screen_holds_the_two_commands() -> None:
    screen = README.splitlines()[:40]
    assert any(
        line.startswith("python -m pip install -c constraints.txt . && lightning-dilated fit") for line in screen
    )
    assert any(
        line.startswith("python -m pip install") and line.endswith("pytest -n 2 --dist loadfile") for line in screen
    )


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_first_block_trains_a_lightning_module() -> None:
    scope: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", README, re.S)[0], scope)
    assert scope["trainer"].global_step == 3


def test_own_model_block_trains_one_step() -> None:
    scope: dict[str, object] = {}
    exec(block("class MyEncoder"), scope)
    assert scope["trainer"].global_step == 3
    model = scope["MyEncoder"]()
    model.configure_model()
    loss, tokens = model.token_mean((torch.randn(2, 100, 256), torch.randint(0, 10, (2, 100))))
    loss.backward()
    assert int(tokens) == 200
    assert all(p.grad is not None for p in model.parameters())


def test_many_ranks_block_runs_on_two(tmp_path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(block("torchrun"))
    done = run_ranks(2, script, cwd=tmp_path)
    assert done.codes == [0, 0], done.stderr[-2000:]
    assert done.stdout.count("exchange: gather") == 2


TRAIN = """
{block}
# not printed: the ranks' progress bars share their standard output
with open(f"sum.{{trainer.world_size}}.{{trainer.global_rank}}", "w") as file:
    file.write(str(sum(p.detach().double().abs().sum().item() for p in model.parameters())))
"""


def test_own_module_trains_alike_on_two_ranks(tmp_path) -> None:
    sums = []
    for devices in (1, 2):
        script = tmp_path / "train.py"
        script.write_text(TRAIN.format(block=block("class Tagger").replace("devices=2", f"devices={devices}")))
        done = run_ranks(devices, script, cwd=tmp_path)
        assert done.codes == [0] * devices, done.stderr[-2000:]
        sums += [float((tmp_path / f"sum.{devices}.{rank}").read_text()) for rank in range(devices)]
    assert max(sums) - min(sums) < 1e-6 * sums[0], sums


LINKS = {(page, link) for page, text in PAGES.items() for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)}


@pytest.mark.parametrize("page, link", sorted(LINKS), ids=lambda x: str(x))
def test_links_lead_somewhere(page: Path, link: str) -> None:
    assert (ROOT / page.parent / link).exists()


def test_every_page_is_in_the_table_of_contents() -> None:
    index = PAGES[Path("docs/index.md")]
    assert not [page for page in ROOT.glob("docs/*.md") if page.name != "index.md" and f"({page.name})" not in index]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`ld\.(\w+)", TEXT))))
def test_names_are_public(name: str) -> None:
    assert hasattr(ld, name)


def test_engine_table_matches_the_registry() -> None:
    listed = set(re.findall(r"^\| `([\w:]+)` \| (?:CUDA|CPU|any)", TEXT, re.M))
    assert listed == {name for name in ENGINES if ":" not in name}


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^lightning-dilated (\w+)", TEXT, re.M))))
def test_commands_exist(command: str) -> None:
    assert command in {*DilatedCLI.subcommands(), *COMMANDS}


def texts_of_the_package() -> list[str]:
    """Return all strings in the package's source, with … in place of formatted values."""
    nodes = (x for path in Path(ld.__file__).parent.rglob("*.py") for x in ast.walk(ast.parse(path.read_text())))
    texts = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(x.value if isinstance(x, ast.Constant) else "…" for x in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(re.sub(r"%[sd]", "…", node.value))
    return texts


def test_troubleshooting_quotes_the_program() -> None:
    page = PAGES[Path("docs/troubleshooting.md")]
    quotes = "\n".join(re.findall(r"```text\n(.*?)```", page, re.S)).splitlines()
    parts = {part.strip(" .,:()") for quote in quotes for part in quote.split("…")}
    source = "\n".join(texts_of_the_package())
    assert len(quotes) > 20
    assert not [part for part in parts if part not in source]
