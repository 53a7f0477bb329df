"""The command line: one LightningCLI, with `generate` beside fit, validate, test and predict."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_dilated import __version__
from lightning_dilated.generate import run as run_generate
from lightning_dilated.models import DilatedModule

PROG = "lightning-dilated"
#: keywords that Lightning itself understands in place of a path
CKPT_WORDS = ("best", "last", "hpc", "registry")

HELP = f"""usage: {PROG} COMMAND [--config RECIPE.yaml] [--KEY VALUE ...]

Train transformers with dilated attention on long sequences.

commands:
  fit        train; a checkpoint, config.yaml and plots go to the run folder
  validate   validation loss of a checkpoint
  test       test loss of a checkpoint
  predict    bits per byte of every test sequence, as a CSV
  generate   continue a prompt: --ckpt_path X.ckpt --prompt TEXT

start here:
  {PROG} fit --config recipes/quickstart.yaml
  {PROG} fit --config recipes/quickstart.yaml --data.seq_len 8192
  {PROG} fit --config recipes/quickstart.yaml --print_config
  {PROG} validate --config recipes/quickstart.yaml --ckpt_path PATH

Every value of a recipe can be given as --KEY VALUE, and --config may be repeated:
the later one wins. `{PROG} fit --help` lists all keys; recipes that come with the
package are found by name, as in --config quickstart.yaml. With
LIGHTNING_DILATED_TRACEBACK=1 a wrong setting shows where it was noticed.
"""


def fail(message: Any, code: int = 2) -> NoReturn:
    """Say what is wrong on standard error and stop."""
    print(f"{PROG}: error: {message}", file=sys.stderr)
    raise SystemExit(code)


class DilatedCLI(LightningCLI):
    """LightningCLI whose model is any DilatedModule and whose data any LightningDataModule, both by `class_path`.

    Optimizers belong to the model (`model.init_args.optimizer`): a top-level `optimizer:` would be built before the
    parameters are final, and then train nothing.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            model_class=DilatedModule,
            datamodule_class=pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": PROG},
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The data is Python's own source unless something else is named."""
        parser.set_defaults({"data": {"class_path": "lightning_dilated.data.ByteDataModule"}})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and look at the checkpoint before anything is built."""
        super().parse_arguments(parser, args)
        path = self.config[self.config.subcommand].get("ckpt_path")
        if path and path not in CKPT_WORDS:
            check_checkpoint(path)

    def instantiate_classes(self) -> None:
        """Build model, data and trainer; a wrong value is one line, before any work."""
        try:
            super().instantiate_classes()
            check = getattr(self.datamodule, "check", None)
            if callable(check):
                check()
        except (ValueError, TypeError, OSError) as error:
            if os.environ.get("LIGHTNING_DILATED_TRACEBACK"):
                raise
            fail(error)


def check_checkpoint(path: str) -> None:
    """Stop with one line if a checkpoint is missing or unreadable."""
    if not Path(path).exists():
        fail(
            f"--ckpt_path {path} does not exist. Pass a .ckpt file that fit wrote (see checkpoints/ in the run folder)."
        )
    if Path(path).is_file():
        try:
            torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        except Exception as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            fail(
                f"--ckpt_path {path} cannot be read as a checkpoint ({first}). It may be cut short; use an earlier one."
            )


def recipe_folders() -> list[Path]:
    """Where recipes of the package lie: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    return [f for f in (package / "recipes", package.parent / "recipes") if f.is_dir()]


def find_recipe(name: str) -> str:
    """The path of a config: as given, else the package's recipe of that file name."""
    if Path(name).is_file():
        return name
    for folder in recipe_folders():
        if (folder / Path(name).name).is_file():
            return str(folder / Path(name).name)
    known = sorted({f.name for folder in recipe_folders() for f in folder.glob("*.yaml")})
    fail(f"--config {name}: no such file, and no recipe of that name. Recipes: {', '.join(known)}.")


def with_recipes(argv: list[str]) -> list[str]:
    """The arguments, each --config replaced by the file it means."""
    out = list(argv)
    for i, word in enumerate(out):
        if word in ("--config", "-c") and i + 1 < len(out):
            out[i + 1] = find_recipe(out[i + 1])
        elif word.startswith("--config="):
            out[i] = "--config=" + find_recipe(word.removeprefix("--config="))
    return out


def main(argv: list[str] | None = None) -> None:
    """Run the command line; `argv` without the program's name, `sys.argv[1:]` if None."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
    elif argv[0] == "--version":
        print(f"{PROG} {__version__}")
    elif argv[0] == "generate":
        try:
            run_generate(argv[1:])
        except (ValueError, TypeError, OSError) as error:
            if os.environ.get("LIGHTNING_DILATED_TRACEBACK"):
                raise
            fail(error)
    else:
        known = sorted(DilatedCLI.subcommands())
        if not argv[0].startswith("-") and argv[0] not in known:
            fail(f"no command {argv[0]!r}. Commands: {', '.join([*known, 'generate'])}.")
        # Lightning's launchers start their workers with sys.argv, so the recipe's real path has to be there
        sys.argv = [sys.argv[0], *with_recipes(argv)]
        DilatedCLI()
