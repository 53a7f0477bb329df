"""What the README shows is true: its Python runs, its links exist, its commands parse, its tables name real things."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.attention.backends import ENGINES
from lightning_dilated.cli.lightning_cli import DilatedCLI
from lightning_dilated.cli.main import OTHERS

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def block(words: str) -> str:
    """The one Python block that holds these words."""
    (found,) = (b for b in BLOCKS if words in b)
    return found


def test_first_python_block_runs_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    exec(BLOCKS[0], scope)
    assert scope["out"].shape == (1, 4096, 8, 64)
    assert scope["q"].grad is not None
    assert "keys a row" in capsys.readouterr().out


def test_first_screen_holds_the_two_commands() -> None:
    screen = TEXT.splitlines()[:40]
    assert any(
        line.startswith("python -m pip install -c constraints.txt . && lightning-dilated fit") for line in screen
    )
    assert any(
        line.startswith("python -m pip install") and line.endswith("pytest -n 2 --dist loadfile") for line in screen
    )


def test_own_model_block_trains_one_step() -> None:
    scope: dict[str, object] = {"torch": torch, "ld": ld}
    exec(block("class MyEncoder"), scope)
    model = scope["MyEncoder"]()
    model.configure_model()
    loss, tokens = model.token_mean((torch.randn(2, 100, 256), torch.randint(0, 10, (2, 100))))
    loss.backward()
    assert int(tokens) == 200
    assert all(p.grad is not None for p in model.parameters())


def test_many_ranks_block_runs_on_two(tmp_path) -> None:
    (tmp_path / "ranks.py").write_text(block("torchrun"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ranks.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("exchange: gather") == 2


TRAIN = """
{block}

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        of = lambda n: torch.randint(0, n, (500,), generator=torch.Generator().manual_seed(i))
        return {{"tokens": of(256), "tags": of(10)}}

pl.seed_everything(0)
model = Tagger()
trainer.fit(model, torch.utils.data.DataLoader(Data()))
# not printed: the ranks' progress bars share their standard output
with open(f"sum.{{trainer.world_size}}.{{trainer.global_rank}}", "w") as file:
    file.write(str(sum(p.detach().double().abs().sum().item() for p in model.parameters())))
"""


def test_own_module_trains_alike_on_two_ranks(tmp_path) -> None:
    found = []
    for devices in (1, 2):
        text = TRAIN.format(block=block("class Tagger").replace("devices=2", f"devices={devices}"))
        (tmp_path / "train.py").write_text(text)
        done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
        found += [float((tmp_path / f"sum.{devices}.{rank}").read_text()) for rank in range(devices)]
    assert max(found) - min(found) < 1e-6 * found[0], found


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", TEXT))))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`ld\.(\w+)", TEXT))))
def test_names_are_public(name: str) -> None:
    assert hasattr(ld, name)


def test_engine_table_matches_the_registry() -> None:
    listed = set(re.findall(r"^\| `([\w:]+)` \| (?:CUDA|CPU|any)", TEXT, re.M))
    assert listed == set(ENGINES)


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^lightning-dilated (\w+)", TEXT, re.M))))
def test_commands_exist(command: str) -> None:
    assert command in {*DilatedCLI.subcommands(), *OTHERS}
