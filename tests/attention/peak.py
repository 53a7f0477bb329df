"""Peak memory of a piece of code in a new process, so that earlier code does not count."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_PRELUDE = """
import re, sys
import torch
from lightning_dilated.attention import dilated_attention
from lightning_dilated.pattern import Branch, DilatedPattern
torch.set_num_threads(1)

def status(field):
    return int(re.search(rf"{field}:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024

def peak(run):
    '''Return the peak bytes of `run` above the memory in use at its start, and its result.'''
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets VmHWM
    before = status("VmRSS")
    result = run()
    return status("VmHWM") - before, result

warm = torch.randn(1, 8, 1, 8, requires_grad=True)  # the first call loads code
for engine in ("auto", "math"):
    dilated_attention(warm, warm, warm, DilatedPattern.dense(4), engine=engine).sum().backward()
"""


def printed(code: str) -> list[int]:
    """Run `code` after the prelude above in a new process, and return the integers that it prints."""
    try:
        Path("/proc/self/clear_refs").open("w").close()
    except OSError:
        pytest.skip("needs /proc/self/clear_refs to reset the peak of resident memory")
    # without this, freed tensors stay resident in the heap, and heap fragments count toward the peak
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", _PRELUDE + textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return [int(x) for x in done.stdout.split()]
