"""The strategies' option links=: the sequence's group gets the file's links; a missing file raises at the start."""

import pytest

from lightning_dilated.sequence import Links
from lightning_dilated.sequence.links import VARIABLE

from .runs import Run, launched, make, trainer

pytestmark = pytest.mark.full


def test_the_machine_s_missing_file(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError, match=rf"^{VARIABLE}="):
        trainer("ring_dilated", 2)


def links_of(rank, group, run):
    """Return (links of the group, text about links in the plan of a step)."""
    built, model, data, _ = make(run, launched(rank))
    built.fit(model, data)
    return built.strategy.sequence.links, built.strategy.sequence.plan.links


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
def test_a_file_reaches_the_group(pools, tmp_path, fsdp):
    ours = Links(near=2e9, round=1e-3)
    ours.save(tmp_path / "links.json")
    run = Run(steps=1, fsdp=fsdp, double=fsdp, strategy={"links": str(tmp_path / "links.json")})
    assert pools(2).run(2, links_of, run) == [(ours, ours)] * 2
