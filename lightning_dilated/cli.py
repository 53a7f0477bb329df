"""The command line: one LightningCLI, with `generate` beside fit, validate, test and predict."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_dilated import __version__
from lightning_dilated.checkpoint import model_config, read_checkpoint
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


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what a wrong setting raises into one line, unless the traceback is asked for."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        if os.environ.get("LIGHTNING_DILATED_TRACEBACK"):
            raise
        fail(essence(str(error)))


def essence(message: str) -> str:
    """What went wrong, out of the parser's nested report of every type that it tried."""
    reasons = [line.strip().removeprefix("- ") for line in message.splitlines() if line.lstrip().startswith("- ")]
    reasons = [r for r in reasons if not r.startswith("Expected a <class 'NoneType'>")]
    return "; ".join(reasons) if "Given value" in message and reasons else message


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
        if path and path not in CKPT_WORDS and not Path(path).is_dir():
            with one_line_errors():
                read_checkpoint(path)

    def _parse_ckpt_path(self) -> None:
        """Lightning puts the checkpoint's hyperparameters over the config; without a class in it, it would fail."""
        path = self.config[self.config.subcommand].get("ckpt_path")
        if path and Path(path).is_file() and "_class_path" not in read_checkpoint(path).get("hyper_parameters", {}):
            return
        super()._parse_ckpt_path()

    def instantiate_classes(self) -> None:
        """Build model, data and trainer; a wrong value is one line, before any work."""
        with one_line_errors():
            super().instantiate_classes()
            check = getattr(self.datamodule, "check", None)
            if callable(check):
                check()


def with_model(argv: list[str]) -> list[str]:
    """The arguments, with the model of --ckpt_path added where neither a config nor a model is given."""
    named = any(word.split("=")[0] in ("--config", "-c") or word.startswith("--model") for word in argv)
    if named or any(word in ("-h", "--help") or word.startswith("--print_config") for word in argv):
        return argv
    path = option(argv, "--ckpt_path")
    if path is None or path in CKPT_WORDS or Path(path).is_dir():
        fail(f"{argv[0]} needs a model: give --config RECIPE.yaml, --ckpt_path FILE.ckpt, or --model CLASS.")
    return [*argv, f"--model={json.dumps(model_config(read_checkpoint(path)))}"]


def option(argv: list[str], name: str) -> str | None:
    """The last value of an option, in either spelling."""
    found = None
    for word, following in itertools.zip_longest(argv, argv[1:]):
        if word == name:
            found = following
        elif word.startswith(name + "="):
            found = word.removeprefix(name + "=")
    return found


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
        with one_line_errors():
            run_generate(argv[1:])
    else:
        known = sorted(DilatedCLI.subcommands())
        if not argv[0].startswith("-") and argv[0] not in known:
            fail(f"no command {argv[0]!r}. Commands: {', '.join([*known, 'generate'])}.")
        # Lightning's launchers start their workers with sys.argv, so the recipe's real path has to be there
        with one_line_errors():
            sys.argv = [sys.argv[0], *with_model(with_recipes(argv))]
        DilatedCLI()
