"""The command line: fit, validate, test and predict are LightningCLI's; a table has the other commands."""

from __future__ import annotations

import os
import pkgutil
import sys
import warnings

from lightning_dilated import __version__
from lightning_dilated._device import expandable_segments
from lightning_dilated.cli.errors import PROG, fail, one_line_errors
from lightning_dilated.cli.lightning_cli import DilatedCLI, with_checkpoint, with_recipes

#: the commands that are not LightningCLI's, each a function of its arguments; imported by name, as loading takes seconds
OTHERS = {
    "generate": "lightning_dilated.cli.generate:run",
    "score": "lightning_dilated.cli.score:run",
    "tokenize": "lightning_dilated.cli.datasets:tokenize",
    "pairs": "lightning_dilated.cli.datasets:pairs",
    "explain": "lightning_dilated.cli.explain:run",
    "verify": "lightning_dilated.cli.verify:run",
    "bench": "lightning_dilated.cli.bench:run",
    "consolidate": "lightning_dilated.cli.consolidate:run",
    "folds": "lightning_dilated.cli.folds:run",
    "export": "lightning_dilated.cli.export:run",
    "plan": "lightning_dilated.cli.plan:run",
}

HELP = f"""usage: {PROG} COMMAND [--config RECIPE.yaml] [--KEY VALUE ...]

Train transformers with dilated attention on long sequences. Commands:
  fit        train; a checkpoint, config.yaml and plots go to the run folder
  validate   validation loss of a checkpoint
  test       test loss of a checkpoint; of slides, metrics with intervals
  predict    a CSV with a row for every test sequence or slide
  generate   continue a prompt: --ckpt_path X.ckpt --prompt TEXT
  score      variants: --ckpt_path X.ckpt --vcf X.vcf --fasta X.fa --out X.csv
  tokenize   text files to tokens: --tokenizer tokenizer.json --out X.bin
  pairs      two versions of a source tree to samples: --old A --new B
  explain    what a pattern can see: --config RECIPE.yaml
  verify     this machine's ranks against one rank: verify --devices 4
  bench      measure this machine: bench attention, bench links
  consolidate  a checkpoint's weights in one file: FOLDER --out X.safetensors
  folds      mean and deviation of the tests of a cross-validation
  export     a file that runs without this package: --ckpt_path X --out X.onnx
  plan       memory, time, longest sequence: plan --config X.yaml --gpus 4

start here:
  {PROG} fit --config recipes/quickstart.yaml
  {PROG} fit --config recipes/quickstart.yaml --data.seq_len 8192
  {PROG} fit --config recipes/quickstart.yaml --print_config
  {PROG} validate --config recipes/quickstart.yaml --ckpt_path PATH

A recipe's values give way to a checkpoint's, and both to --KEY VALUE; of
several --config the later wins. `{PROG} fit --help` lists the keys.
Recipes of the package are found by name: --config quickstart.yaml. With
LIGHTNING_DILATED_TRACEBACK=1 an error shows where it was noticed.
"""


def main(argv: list[str] | None = None) -> None:
    """Run the command line; `argv` without the program's name, `sys.argv[1:]` if None."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
    elif argv[0] == "--version":
        print(f"{PROG} {__version__}")
    elif argv[0] in OTHERS:
        with one_line_errors():
            pkgutil.resolve_name(OTHERS[argv[0]])(with_recipes(argv)[1:])
    else:
        known = sorted(DilatedCLI.subcommands())
        if not argv[0].startswith("-") and argv[0] not in known:
            fail(f"no command {argv[0]!r}. Commands: {', '.join([*known, *OTHERS])}.")
        expandable_segments(os.environ)
        # Lightning's launchers start their workers with sys.argv, so the recipe's real path has to be there
        # DilatedModule keeps lengths on the CPU for the op; that it does so needs no warning at every start
        warnings.filterwarnings("ignore", message="You have overridden `transfer_batch_to_device` in `LightningModule`")
        with one_line_errors():
            sys.argv = [sys.argv[0], *with_checkpoint(with_recipes(argv))]
        DilatedCLI()
