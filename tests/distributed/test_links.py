"""Links of a group: "auto" uses them on every rank, and all ranks refuse links that differ between ranks."""

import pytest
import torch

from lightning_dilated.attention import dilated_attention
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import Links
from lightning_dilated.sequence.links import VARIABLE

from .calls import sequence

PATTERN = DilatedPattern.geometric(4, 32)


def chosen(rank, group, links, settings=None):
    """Return (exchange or error, sent bytes, links of the plan) of a call. `links[rank]` are the links of this rank."""
    with sequence(group, links=links[rank], **(settings or {})) as ours:
        x = torch.ones(1, 8, 4, 2)
        try:
            dilated_attention(x, x, x, PATTERN, sequence=ours)
        except ValueError as error:
            return str(error), ours.forward_traffic.sent, None
        return ours.plan.exchange, ours.forward_traffic.sent, ours.plan.links


@pytest.mark.parametrize(
    "links, want",
    [(Links(round=1.0), "gather"), (Links(message=1.0), "butterfly"), (Links(near=1.0), "switch"), (None, "gather")],
)
def test_auto_reckons_with_the_group_s_links(pool, links, want):
    for exchange, sent, used in pool.run(4, chosen, [links] * 4):
        assert exchange == want and sent > 0
        assert used == (links or Links())  # the tests' environment has the default links


def test_a_rank_with_other_links(pool):
    for error, sent, _ in pool.run(3, chosen, [Links(), Links(), Links(near=2.5e9)]):
        assert "links: rank 2 has near=2500000000.0, far=50000000000.0" in error
        assert "; the others have near=259000000000.0" in error
        assert "Measure them once with `lightning-dilated bench links --output FILE`" in error
        assert sent == 0


def test_links_that_do_not_matter(pool):
    same = [Links(source="a"), Links(source="b"), Links()]
    assert {x for x, *_ in pool.run(3, chosen, same)} == {"gather"}
    other = [Links(), Links(), Links(near=1e9)]
    assert {x for x, *_ in pool.run(3, chosen, other, {"exchange": "ring"})} == {"ring"}


def of_a_file(rank, group, path, links):
    """Return the links of the group, or the error, while the environment variable names the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, path)
        try:
            with sequence(group, links=links) as ours:
                return ours.links
        except (OSError, TypeError) as error:
            return f"{type(error).__name__}: {error}"


def test_the_machine_s_file(pool, tmp_path):
    ours = Links(near=3e9)
    ours.save(tmp_path / "links.json")
    assert pool.run(2, of_a_file, str(tmp_path / "links.json"), None) == [ours] * 2
    assert pool.run(2, of_a_file, str(tmp_path / "links.json"), Links(far=1.0)) == [Links(far=1.0)] * 2
    for error in pool.run(2, of_a_file, str(tmp_path / "none.json"), None):
        assert error.startswith("FileNotFoundError: LIGHTNING_DILATED_LINKS=")
    for error in pool.run(2, of_a_file, "defaults", "links.json"):
        assert error == "TypeError: links must be a Links or None, got 'links.json'; Links.load(path) reads a file."


def formatted(rank, group):
    """Count how often `agree` formats the link speeds."""
    with sequence(group) as ours, pytest.MonkeyPatch.context() as patch:
        calls = []
        patch.setattr(Links, "numbers", property(lambda self: calls.append(1)))
        ours.agree({"call": "here"})
        return len(calls)


def test_agreeing_formats_no_numbers(pool):
    assert pool.run(2, formatted) == [0, 0]  # `agree` runs in every call, so it must not format them
