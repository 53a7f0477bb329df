"""The longest sequence: the search against every answer there can be, and true trials on the CPU with little memory."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lightning_dilated.find_max import Trials, longest


@given(
    most=st.integers(1, 5000),
    start=st.integers(1, 6000),
    multiple=st.integers(1, 7),
    within=st.sampled_from([0, 0.03, 0.4]),
    limit=st.one_of(st.none(), st.integers(7, 4000)),
)
def test_search(most, start, multiple, within, limit):
    tried = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= most

    if most < multiple:
        with pytest.raises(ValueError, match=f"not even {multiple} tokens fit"):
            longest(fits, start, multiple, within, limit)
        return
    found = longest(fits, start, multiple, within, limit)
    assert found.times == len(tried) == len(set(tried)) and not any(x % multiple for x in tried)
    assert found.fits in tried and found.fits <= most and (limit is None or max(tried) <= limit)
    if found.fails is None:
        assert limit is not None and found.fits == limit // multiple * multiple
    else:
        assert found.fails in tried and found.fails > most
        assert found.fails - found.fits <= max(multiple, within * found.fits)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"start": 0}, "start must be at least 1"),
        ({"start": 4, "multiple": 0}, "multiple must be at least 1"),
        ({"start": 4, "within": 1}, "within must be a part"),
        ({"start": 4, "multiple": 8, "most": 7}, "most=7 is below 8"),
    ],
)
def test_search_refuses(given, words):
    with pytest.raises(ValueError, match=words):
        longest(lambda n: True, **given)


@pytest.fixture
def recipe(tmp_path):
    """A small model whose logits of 256 kinds take most of its memory."""
    pattern = {"segment_lengths": [64], "dilation_rates": [1]}
    settings = {
        "trainer": {"accelerator": "cpu", "callbacks": [{"class_path": "lightning_dilated.callbacks.RunReport"}]},
        "model": {"class_path": "LongNetLM", "init_args": {"pattern": pattern, "dim": 16, "depth": 1, "num_heads": 2}},
        "data": {"class_path": "lightning_dilated.data.ListOpsDataModule"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return ["--config", str(path)]


def test_trials(recipe):
    """1M tokens need 1 GiB for each copy of the logits, and there are several; 2,048 need 2 MiB."""
    trials = Trials(recipe, ranks=1, timeout=120, limit=1.5)
    few, many = trials(2048), trials(1048576)
    assert few.fits and few.seconds > 0 and "2,048 tokens: fits" in str(few)
    assert not many.fits and "rank 0: " in many.message and "out of memory" in str(many)


def test_two_ranks_share_a_sequence(recipe):
    found = Trials([*recipe, "--trainer.strategy=ring_dilated"], ranks=2, timeout=120)(512)
    assert found.fits and found.tokens == 512


def test_another_error_is_none_of_memory(recipe):
    with pytest.raises(RuntimeError, match=r"rank 0 ended with exit code .* not for want of memory[\s\S]*num_heads"):
        Trials([*recipe, "--model.num_heads=3"], ranks=1, timeout=120)(512)


@pytest.mark.slow
def test_too_slow(recipe):
    with pytest.raises(TimeoutError, match=r"took more than 0\.1 s"):
        Trials(recipe, ranks=1, timeout=0.1)(512)
