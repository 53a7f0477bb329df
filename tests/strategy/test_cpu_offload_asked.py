"""How cpu_offload is asked for: in Python and in recipes, of both strategies."""

import pytest
import yaml
from jsonargparse import ArgumentParser
from torch.distributed.fsdp import CPUOffloadPolicy

import lightning_dilated
from lightning_dilated import RingDilatedFSDPStrategy, RingDilatedStrategy


def from_yaml(name, given):
    """A strategy whose cpu_offload a recipe gives."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=getattr(lightning_dilated, name))
    config = {"class_path": f"lightning_dilated.{name}", "init_args": {"cpu_offload": yaml.safe_load(given)}}
    return parser.instantiate_classes(parser.parse_object({"strategy": config})).strategy


@pytest.mark.parametrize("given, pinned", [("true", True), ("{pin_memory: false}", False), ("false", None)])
def test_from_yaml(given, pinned):
    made = from_yaml("RingDilatedFSDPStrategy", given)
    assert (made._offload and made._offload.pin_memory) is pinned


@pytest.mark.parametrize("given", ["cpu", 1, None])
def test_other_values_are_refused(given):
    with pytest.raises(TypeError, match=f"cpu_offload must be True, False or .*CPUOffloadPolicy.*got {given!r}"):
        RingDilatedFSDPStrategy(cpu_offload=given)


def test_whole_parameters_are_not_offloaded():
    with pytest.raises(TypeError, match=r"takes no cpu_offload: use RingDilatedFSDPStrategy\(cpu_offload=True\)"):
        RingDilatedStrategy(cpu_offload=True)
    with pytest.raises(TypeError, match=r"use RingDilatedFSDPStrategy\(cpu_offload=CPUOffloadPolicy\(pin_memory=False"):
        RingDilatedStrategy(cpu_offload=CPUOffloadPolicy(pin_memory=False))


def test_whole_parameters_without_asking():
    """As a recipe says that switches between the strategies."""
    made = RingDilatedStrategy(cpu_offload=False)
    assert made._ddp_kwargs.keys() == RingDilatedStrategy()._ddp_kwargs.keys()
    assert from_yaml("RingDilatedStrategy", "false")._ddp_kwargs.keys() == made._ddp_kwargs.keys()
    with pytest.raises(TypeError, match=r"RingDilatedStrategy holds all parameters.*use RingDilatedFSDPStrategy"):
        from_yaml("RingDilatedStrategy", "true")
