"""links= of the strategies: a file reaches the group of the sequence; a missing one is an error before anything starts."""

import pytest

from lightning_dilated import RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.sequence import Links
from lightning_dilated.sequence.links import VARIABLE

from .runs import Run, launched, make, trainer

pytestmark = pytest.mark.full

BOTH = pytest.mark.parametrize("strategy", [RingDilatedStrategy, RingDilatedFSDPStrategy])


@BOTH
def test_a_missing_file(strategy, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json: No such file .*bench links --output"):
        trainer(strategy(links=str(tmp_path / "none.json")), 2)


@BOTH
def test_a_wrong_file(strategy, tmp_path):
    path = tmp_path / "links.json"
    path.write_text('{"near": 1}')
    with pytest.raises(ValueError, match=r"links\.json: missing: far, round, message"):
        strategy(links=str(path))
    with pytest.raises(TypeError, match="links must be the path of a file"):
        strategy(links=Links())


def test_the_machine_s_missing_file(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError, match=rf"^{VARIABLE}="):
        trainer("ring_dilated", 2)


def links_of(rank, group, run):
    """The links of the group, and what the plan of a step said."""
    built, model, data, _ = make(run, launched(rank))
    built.fit(model, data)
    return built.strategy.sequence.links, built.strategy.sequence.plan.links


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
def test_a_file_reaches_the_group(pools, tmp_path, fsdp):
    ours = Links(near=2e9, round=1e-3)
    ours.save(tmp_path / "links.json")
    run = Run(steps=1, fsdp=fsdp, double=fsdp, strategy={"links": str(tmp_path / "links.json")})
    assert pools(2).run(2, links_of, run) == [(ours, ours)] * 2
