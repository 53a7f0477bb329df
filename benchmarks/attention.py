"""The op beside dense attention of the same FLOPs: `lightning-dilated bench attention`, by its old name.

    python benchmarks/attention.py                                          # this machine
    python benchmarks/attention.py --device cuda --dtype bfloat16 --seq-len 1048576 --heads 12 --head-dim 64 \
        --segments 2048 4096 8192 16384 32768 --dilations 1 2 4 8 16
"""

import sys

from lightning_dilated.ext.profiling.bench import run

if __name__ == "__main__":
    run(["attention", *sys.argv[1:]])
