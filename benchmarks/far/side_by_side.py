"""Run a list of command lines in order, several at a time, each with its own output file.

    python benchmarks/far/side_by_side.py jobs.txt --at-once 6 --logs logs

A line of the list is a command for the shell. At an empty line, the script waits until all earlier commands have ended.
Prints when each command starts and ends.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path


def main() -> None:
    """Start commands in order, at most `--at-once` at a time."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("list", type=Path)
    p.add_argument("--at-once", type=int, default=6)
    p.add_argument("--logs", type=Path, default=Path("logs"))
    a = p.parse_args()
    a.logs.mkdir(parents=True, exist_ok=True)
    began, running = time.monotonic(), {}

    def wait(most: int) -> None:
        while len(running) > most:
            for process in [x for x in running if x.poll() is not None]:
                print(f"{time.monotonic() - began:6.0f} s: {process.returncode} {running.pop(process)}", flush=True)
            time.sleep(0.2)

    for number, line in enumerate(a.list.read_text().splitlines()):
        if not line.strip():
            wait(0)
            continue
        wait(a.at_once - 1)
        with (a.logs / f"{number}.log").open("w") as log:
            running[subprocess.Popen(line, shell=True, stdout=log, stderr=subprocess.STDOUT)] = line
        print(f"{time.monotonic() - began:6.0f} s: begin {line}", flush=True)
    wait(0)


if __name__ == "__main__":
    main()
