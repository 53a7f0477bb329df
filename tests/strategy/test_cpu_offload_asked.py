"""Both strategies accept cpu_offload as documented, in Python and in recipes."""

import pytest
import yaml
from jsonargparse import ArgumentParser

import lightning_dilated
from lightning_dilated import RingDilatedStrategy


def from_yaml(name, value):
    """Return the strategy of a recipe with `cpu_offload`."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=getattr(lightning_dilated, name))
    config = {"class_path": f"lightning_dilated.{name}", "init_args": {"cpu_offload": yaml.safe_load(value)}}
    return parser.instantiate_classes(parser.parse_object({"strategy": config})).strategy


@pytest.mark.parametrize("given, pinned", [("true", True), ("{pin_memory: false}", False), ("false", None)])
def test_from_yaml(given, pinned):
    strategy = from_yaml("RingDilatedFSDPStrategy", given)
    assert (strategy._offload and strategy._offload.pin_memory) is pinned


def test_whole_parameters_without_asking():
    """`cpu_offload=False` is allowed for unsharded parameters, so that a recipe can change its strategy."""
    strategy = RingDilatedStrategy(cpu_offload=False)
    assert strategy._ddp_kwargs.keys() == RingDilatedStrategy()._ddp_kwargs.keys()
    assert from_yaml("RingDilatedStrategy", "false")._ddp_kwargs.keys() == strategy._ddp_kwargs.keys()
    with pytest.raises(TypeError, match=r"RingDilatedStrategy holds all parameters.*use RingDilatedFSDPStrategy"):
        from_yaml("RingDilatedStrategy", "true")
