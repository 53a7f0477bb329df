"""Links: refused values, the locations of the file, and the effect of links on the choice of "auto"."""

import json

import pytest

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import Links, make_problem, plan
from lightning_dilated.sequence.links import NUMBERS, VARIABLE, cached

OURS = Links(1.5e9, 2.5e8, 1 / 3, 1e-5, "measured on two tin cans")
WHOLE = {"near": 1.5e9, "far": 2.5e8, "round": 1e-4, "message": 1e-5, "source": "here"}


# -- the numbers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 10**400, "1e9", True, None])
def test_a_field_that_is_no_speed(name, value):
    with pytest.raises((TypeError, ValueError), match=rf"^{name} must be a number( in .*)?, got "):
        Links(**{name: value})


def test_the_source_is_no_part_of_the_numbers():
    assert Links(near=1e9, source="a") == Links(near=1e9, source="b") != Links(near=2e9, source="a")
    assert Links(near=1e9, source="a").numbers == Links(near=10**9, source="b").numbers
    assert (Links().source, Links(far=1e9).source) == ("defaults", "given")


# -- the file ----------------------------------------------------------------------------------------------------------
def test_round_trip(tmp_path):
    path = tmp_path / "new" / "links.json"
    OURS.save(path)
    OURS.save(path)
    loaded = Links.load(str(path))
    assert loaded == OURS and loaded.source == OURS.source
    assert [p.name for p in path.parent.iterdir()] == ["links.json"]


def test_a_file_without_a_source_is_the_source(tmp_path):
    path = tmp_path / "links.json"
    path.write_text(json.dumps({name: WHOLE[name] for name in NUMBERS}))
    assert Links.load(path).source == str(path)


WRONG = {
    "missing": ({k: v for k, v in WHOLE.items() if k != "far"}, "missing: far. A file of links holds near, far"),
    "unknown": ({**WHOLE, "latency": 1}, "unknown: latency. A file of links holds near, far"),
    "text": ({**WHOLE, "round": "40us"}, "round must be a number, got '40us'"),
    "zero": ({**WHOLE, "near": 0}, "near must be a number in (0, inf), got 0"),
    "source": ({**WHOLE, "source": 3}, "source must be text, got 3"),
    "list": ([1, 2], "not a mapping of near, far"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file(tmp_path, name):
    values, text = WRONG[name]
    path = tmp_path / "links.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError) as raised:
        Links.load(path)
    assert str(raised.value).startswith(f"{path}: {text}")
    assert f"`lightning-dilated bench links --output {path}` measures" in str(raised.value)


@pytest.mark.parametrize("text", [b"near: 1e9", b"\xff\xfe"], ids=["yaml", "bytes"])
def test_a_file_of_something_else(tmp_path, text):
    path = tmp_path / "links.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"links\.json is not JSON .*bench links --output"):
        Links.load(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json: No such file.*bench links --output .*none\.json"):
        Links.load(tmp_path / "none.json")
    with pytest.raises(IsADirectoryError, match=r"Is a directory.*bench links"):
        Links.load(tmp_path)
    with pytest.raises(TypeError, match=r"must be the path of a file .*, got Links"):
        Links.load(OURS)


# -- where it is looked for --------------------------------------------------------------------------------------------
@pytest.fixture
def home_folder(tmp_path, monkeypatch):
    """An environment without measured links."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_of_this_machine(home_folder, monkeypatch):
    assert Links.of_this_machine() == Links() and Links.of_this_machine().source == "defaults"
    OURS.save(cached())
    assert Links.of_this_machine() == OURS and cached() == home_folder / ".cache" / "lightning-dilated" / "links.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home_folder / "elsewhere"))
    assert Links.of_this_machine() == Links()
    monkeypatch.setenv(VARIABLE, str(home_folder / ".cache" / "lightning-dilated" / "links.json"))
    assert Links.of_this_machine() == OURS
    monkeypatch.setenv(VARIABLE, "defaults")
    assert Links.of_this_machine() == Links()


def test_the_variable_names_no_file(home_folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, "none.json")
    with pytest.raises(FileNotFoundError, match=rf"^{VARIABLE}=none\.json: none\.json: No such file"):
        Links.of_this_machine()


def test_a_broken_cached_file_is_no_default(home_folder):
    cached().parent.mkdir(parents=True)
    cached().write_text("{}")
    with pytest.raises(ValueError, match="missing: near, far, round, message"):
        Links.of_this_machine()


# -- what auto takes ---------------------------------------------------------------------------------------------------
GIGAPATH = DilatedPattern.longnet([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16], offsets="blocked")
PROBLEMS = {
    "4 GPUs": (make_problem(DilatedPattern.geometric(2048, 1 << 20), 1 << 20, 12, ranks=4), 4),
    "64 on nodes of 8": (make_problem(DilatedPattern.geometric(2048, 1 << 21), 1 << 21, 12, ranks=64), 8),
    "GigaPath": (make_problem(GIGAPATH, 1 << 20, 16, ranks=8), 8),
}
#: {problem: choices with default links, slow rounds, slow messages, low bandwidth}
TAKEN = {
    "4 GPUs": ("gather", "gather", "butterfly", "switch"),
    "64 on nodes of 8": ("hierarchical_gather", "gather", "butterfly", "switch"),
    "GigaPath": ("gather", "gather", "gather", "switch"),
}
#: {quantity: (links on which it dominates the time, a function that reads it)}; the choice must minimize it
DEAR = {
    "rounds": (Links(round=1.0), lambda p: p.rounds),
    "messages": (Links(message=1.0), lambda p: p.messages),
    "bytes": (Links(near=1e6, far=1e6), lambda p: p.forward + p.backward),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_auto_follows_the_links(name):
    problem, per_node = PROBLEMS[name]
    plans = [plan(problem, ranks_per_node=per_node, links=x) for x in (Links(), *(x for x, _ in DEAR.values()))]
    assert tuple(x.exchange for x in plans) == TAKEN[name]
    for chosen, (links, expensive) in zip(plans[1:], DEAR.values(), strict=True):
        taken = next(p for p in chosen.prices if p.exchange == chosen.exchange)
        assert expensive(taken) == min(expensive(p) for p in chosen.prices)
        assert chosen.links == links


def test_a_plan_says_its_links():
    problem, per_node = PROBLEMS["4 GPUs"]
    text = "near 1.5 GB/s, far 0.25 GB/s, 3.333e+05 us a round, 10 us a message (measured on two tin cans)"
    assert f"links: {text}" in str(plan(problem, ranks_per_node=per_node, links=OURS)).splitlines()
    assert "links" not in str(plan(problem, "gather"))  # a named exchange is not priced


def test_a_file_nested_too_deeply(tmp_path):
    (tmp_path / "links.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"links\.json is not JSON \(.*bench links --output"):
        Links.load(tmp_path / "links.json")
