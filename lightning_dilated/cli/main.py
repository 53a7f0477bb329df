"""The command line: fit, validate, test and predict by LightningCLI, and a table of the other commands."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from lightning_dilated import __version__
from lightning_dilated._device import expandable_segments
from lightning_dilated._extensions import COMMANDS, place
from lightning_dilated._removed import COMMANDS as REMOVED
from lightning_dilated._removed import removed
from lightning_dilated.cli.errors import PROG, fail, one_line_errors
from lightning_dilated.cli.lightning_cli import DilatedCLI
from lightning_dilated.cli.parsing import class_help
from lightning_dilated.cli.recipe import with_recipes

#: beginnings of the warnings to hide
NOISE = (
    # DilatedModule overrides it on purpose, to keep lengths on the CPU
    "You have overridden `transfer_batch_to_device` in `LightningModule`",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # about Lightning's own code
    "Starting from v1.9.0, `tensorboardX` has been removed",  # about the default logger, which config.yaml names
)
#: a warning about the record of the best checkpoints, which matters only in fit
NOISE_UNLESS_FIT = "The dirpath has changed from"

HELP = f"""usage: {PROG} COMMAND [--config RECIPE.yaml] [--KEY VALUE ...]

Train transformers with dilated attention on long sequences. Commands:
  fit        train; a checkpoint, config.yaml and plots go to the run folder
  validate   validation loss of a checkpoint
  test       test loss of a checkpoint; of slides, metrics with intervals
  predict    a CSV with a row for every test sequence or slide
  generate   continue a prompt: --ckpt_path X.ckpt --prompt TEXT
  score      variants: --ckpt_path X.ckpt --vcf X.vcf --fasta X.fa --out X.csv
  evaluate   use of a long context: --ckpt_path X.ckpt --task needle --out DIR
  tokenize   text files to tokens: --tokenizer tokenizer.json --out X.bin
  explain    what a pattern can see: --config RECIPE.yaml
  verify     this machine's ranks against one rank: verify --devices 4
  bench      measure this machine's links: bench links
  consolidate  a checkpoint's weights in one file: FOLDER --out X.safetensors
  folds      mean and deviation of the tests of a cross-validation
  export     a file that runs without this package: --ckpt_path X --out X.onnx
  plan       memory, time, longest sequence: plan --config X.yaml --gpus 4

start here:
  {PROG} fit --config recipes/quickstart.yaml
  {PROG} fit --config recipes/quickstart.yaml --print_config
  {PROG} validate --config recipes/quickstart.yaml --ckpt_path PATH

A checkpoint's values replace a recipe's, --KEY VALUE replaces both, and the
last --config wins. List keys: `{PROG} fit --config X --help`;
keys of a class: `{PROG} fit --model.help SlideEncoder`.
Recipes of the package are found by name: --config quickstart.yaml. With
LIGHTNING_DILATED_TRACEBACK=1 an error shows where it was noticed.
"""


def quiet(command: str) -> None:
    """Hide messages of libraries that appear at every start and that users cannot change."""
    for message in NOISE if command == "fit" else (*NOISE, NOISE_UNLESS_FIT):
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(_is_no_tip)


def _is_no_tip(record: logging.LogRecord) -> bool:
    return "Tip: For seamless cloud" not in record.getMessage()


def main(argv: list[str] | None = None) -> None:
    """Run the command line with arguments `argv`, by default `sys.argv[1:]`."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
    elif argv[0] == "--version":
        print(f"{PROG} {__version__}")
    elif message := removed(argv[0], REMOVED) or removed(" ".join(argv[:2]), REMOVED):
        fail(message)
    elif argv[0] in COMMANDS:
        with one_line_errors():
            place(COMMANDS[argv[0]])(with_recipes(argv)[1:])
    else:
        known = sorted(DilatedCLI.subcommands())
        if not argv[0].startswith("-") and argv[0] not in known:
            fail(f"no command {argv[0]!r}. Commands: {', '.join([*known, *COMMANDS])}.")
        expandable_segments(os.environ)
        quiet(argv[0])
        # Lightning's launchers start workers with sys.argv, so sys.argv must contain the recipe's real path
        with one_line_errors():
            argv = with_recipes(argv)
            if pages := class_help.pages(argv):
                print("\n\n".join(pages))
                return
            sys.argv = [sys.argv[0], *argv]
        try:
            DilatedCLI()
        finally:
            if any(word in ("-h", "--help") for word in argv):
                with one_line_errors():
                    print(f"\n{class_help.footer(argv)}")
