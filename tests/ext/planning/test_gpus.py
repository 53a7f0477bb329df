"""GPUs by name: each has its own link speeds, and guesses are marked as guesses."""

import pytest

from lightning_dilated.ext.planning.gpus import GPUS, NVLINK4, PCIE4, find_gpu
from lightning_dilated.sequence.links import Links

NVLINK = {"H200", "H100", "A100-80GB", "A100-40GB"}


@pytest.mark.parametrize("name", GPUS)
def test_links_are_those_of_the_gpu(name):
    links = GPUS[name].links
    if name in ("H200", "H100"):
        assert links == Links() and "defaults" in links.source and "H200" in links.source
        return
    assert "a guess" in links.source and "bench links" in links.source and "defaults" not in links.source
    if name in NVLINK:
        assert PCIE4 < links.near < Links().near and links.far < Links().far
    else:  # not faster than the lanes in the maker's data sheet
        assert links.source.startswith("no NVLink") and "PCIe 4.0 x16" in links.source
        assert PCIE4 / 4 < links.near < PCIE4 and links.far <= links.near


def test_numbers_by_hand():
    """PCIe 4 has 16 lanes of 16 GT/s (128 of 130 bits). The other links scale with an H200's: 259 of 450 GB/s."""
    assert pytest.approx(16 * 16e9 / 8 * 128 / 130, rel=0.001) == PCIE4
    assert GPUS["L40S"].links.near == GPUS["A10"].links.near == pytest.approx(PCIE4 * 259e9 / NVLINK4, abs=0.5e9)
    assert GPUS["RTX4090"].links.near == GPUS["RTX3090"].links.near == pytest.approx(9e9, abs=0.5e9)
    assert GPUS["A100-80GB"].links.near == pytest.approx(259e9 * 600 / 900, abs=0.5e9)


def test_found_by_name():
    assert find_gpu("h200") is GPUS["H200"] and find_gpu("A100").name == "A100-80GB"
    assert find_gpu("H200").usable(2) < find_gpu("H200").usable(1) < 0.97 * 139.8 * 2**30


def test_more_memory_changes_no_links():
    gpu = find_gpu("rtx 4090", 48)
    assert gpu.memory == 48 * 2**30 and gpu.links == GPUS["RTX4090"].links and gpu.name == "RTX4090 with 48 GiB"
