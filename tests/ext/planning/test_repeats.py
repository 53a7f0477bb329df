"""Footprints that count equal layers once have the same bytes at every moment as a count of all layers."""

from dataclasses import replace

import pytest

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.ext.planning.counting.footprint import footprint
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.counting.repeats import Repeat, find_repeats
from lightning_dilated.memory.settings import MemorySettings

TURNS = {"pattern": {"hybrid": {"local": 256, "global_every": 2}}, "depth": 9, "rotary_base": [10_000, "none"]}
LAYERS = {
    "equal": ({"pattern": DilatedPattern.geometric(256, 2048), "depth": 8}, "bf16-mixed"),
    "in turns": (TURNS, "bf16-true"),
}
SETTINGS = {
    "all": MemorySettings(),
    "attention": MemorySettings("attention-kept"),
    "block": MemorySettings("block"),
    "groups": MemorySettings("block", 2, tile=2048, head_chunks=2),
}


@pytest.mark.parametrize(
    ("layers", "settings", "compiled"),
    [
        ("equal", "all", False),
        ("in turns", "all", True),
        ("equal", "attention", True),
        ("in turns", "block", True),
        ("equal", "groups", True),
        ("in turns", "groups", False),
    ],
)
def test_as_all_layers(layers, settings, compiled):
    options, precision = LAYERS[layers]
    model = LongNetLM(dim=64, num_heads=4, max_seq_len=1 << 20, **options)
    short = counted_model_of(model, precision, SETTINGS[settings], compiled)

    def unequal(depth):
        model = short.make(depth)
        build = model.build

        def numbered():
            build()
            for number, block in enumerate(model.transformer.blocks):
                block.number = number

        model.build = numbered
        return model

    one, other = footprint(short, (8192, 16384)), footprint(replace(short, make=unequal), (8192, 16384))
    assert one.moments == other.moments
    assert (one.parameters, one.trained, one.blocks) == (other.parameters, other.trained, other.blocks)


def test_repeats_are_found():
    assert find_repeats("aaa") == find_repeats("abcabcabc") == find_repeats("aabbaacc") == []
    assert find_repeats("aaaa") == [Repeat(1, 2, 1)]
    assert find_repeats("xababababy") == [Repeat(3, 5, 1)]
    assert find_repeats("aaaaaaa", 2) == []  # three groups and a shorter group
    assert find_repeats("aaaaaaaa", 2) == [Repeat(2, 4, 1)]
    # runs of the same layer are found first, then repetitions of what remains
    assert find_repeats("daaaaa" * 4) == [Repeat(i, i + 1, 2) for i in (2, 6, 10, 14)] + [Repeat(4, 8, 1)]
