"""torchrun whose agent forks its ranks, so that they need not import the package again; its arguments are torchrun's."""

import os
import posix
import runpy
import sys

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args


def run_rank(script: str, *args: str) -> None:
    """One rank: a script, as `python SCRIPT ARGS` runs it."""
    os.getppid = posix.getppid  # the agent's, not what its own starter set
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()


def main() -> None:
    parsed = parse_args(sys.argv[1:])
    config, *_ = config_from_args(parsed)
    config.start_method = "fork"
    elastic_launch(config, run_rank)(parsed.training_script, *parsed.training_script_args)


if __name__ == "__main__":
    main()
