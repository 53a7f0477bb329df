"""`verify` passes on this machine, names a check that differs and exits with 1, and does not wait for a dead rank."""

import os
import time

import pytest
import torch

from lightning_dilated.ext.profiling import verify
from lightning_dilated.ext.profiling.verify import (
    Check,
    RanksFailed,
    Verdict,
    alone,
    by_definition,
    compare,
    matrix,
    run_ranks,
)

pytestmark = pytest.mark.full

CALL = Check("ragged", 61)
STEP = Check("LongNetLM", 61)


# -- the command -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("started", ["forked", pytest.param("as users do", marks=pytest.mark.slow)])
def test_two_ranks_agree(cli, request, started):
    if started == "forked":
        request.getfixturevalue("forked_ranks")
    result = cli("verify", "--devices", 2, "--quick", "--device", "cpu")
    checks = matrix(2, ["float64"], quick=True)
    calls = {(c.pattern, c.causal) for c in checks if c.pattern != "LongNetLM"}
    assert result.code == 0, result.out + result.err
    assert result.out.splitlines()[-1] == f"all {len(checks) + len(calls)} checks agree"
    rows = {line.split()[0] for line in result.out.splitlines() if "float64" in line}
    assert rows == {"one", "ring", "butterfly", "auto"} and "loss" in result.out and "DIFFERS" not in result.out


@pytest.mark.slow
def test_four_ranks_agree_on_everything(cli):
    begin = time.monotonic()
    result = cli("verify", "--devices", 4, "--device", "cpu")
    assert result.code == 0 and result.out.splitlines()[-1].startswith("all "), result.out + result.err
    assert time.monotonic() - begin < 120


def test_a_wrong_rank_is_told(cli, monkeypatch):
    """In one call, one gradient differs from the correct result of two ranks."""

    def two_ranks(ranks, job, checks, **options):
        halves = [list(range(31)), list(range(31, 61))]
        parts = [[(at, part(c, at)) for c in checks] for at in halves]
        parts[1][3][1]["dk"][0, 5] += 1e-3
        return parts

    monkeypatch.setattr(verify, "run_ranks", two_ranks)
    result = cli("verify", "--devices", 2, "--quick", "--device", "cpu")
    checks = matrix(2, ["float64"], quick=True)
    assert result.code == 1 and result.out.count("DIFFERS") == 1
    assert f"differs: {checks[3]}: " in result.out and f"1 of {len(checks) + 4} checks do not agree" in result.out


def part(check, at):
    """Return the share of a rank, cut out of the result of one device."""
    want = by_definition(check)
    if check.pattern == "LongNetLM":
        return {"loss": want["loss"].clone(), "gradients": want["gradients"] / 2}
    return {name: x[:, at].clone() for name, x in want.items()}


def test_a_failed_rank_is_told(cli, monkeypatch):
    def dead(*args, **options):
        raise RanksFailed("rank 1 died with exit code -9 (after 3 results)")

    monkeypatch.setattr(verify, "run_ranks", dead)
    result = cli("verify", "--devices", 2)
    assert result.code == 1 and "rank 1 died with exit code -9" in result.err and "agree" not in result.out


REFUSED = {
    "none": (["--devices", 0], "--devices must be at least 1"),
    "too many GPUs": (["--device", "cuda", "--devices", 99], "GPUs; lower it, or use --device cpu"),
    "timeout": (["--timeout", 0], "--timeout must be a number in"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(cli, name):
    argv, says = REFUSED[name]
    result = cli("verify", *argv)
    assert result.code == 2 and says in result.err


# -- comparing ---------------------------------------------------------------------------------------------------------
def add(rank, name, amount):
    """Return a function that adds `amount` to one value of a rank."""

    def change(parts):
        parts[rank][1][name].view(-1)[5 if name != "loss" else 0] += amount

    return change


CHANGES = {
    "nothing": (CALL, lambda parts: None, True),
    "rounding": (CALL, add(0, "out", 1e-13), True),
    "one value": (CALL, add(1, "dq", 1e-6), False),
    "nan": (CALL, add(1, "dv", torch.nan), False),
    "other rows": (CALL, lambda parts: parts[0][1].update(out=parts[0][1]["out"].roll(1, 1)), False),
    "a rank missing": (CALL, lambda parts: parts.pop(), False),
    "positions twice": (CALL, lambda parts: parts.append(parts[0]), False),
    "a row missing": (CALL, lambda parts: parts[1][1].update(dk=parts[1][1]["dk"][:, :-1]), False),
    "step": (STEP, lambda parts: None, True),
    "loss of one rank": (STEP, add(1, "loss", 1e-3), False),
    "no loss": (STEP, add(0, "loss", torch.nan), False),
    "gradients averaged": (STEP, lambda parts: parts[0][1].update(gradients=parts[0][1]["gradients"] / 2), False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_compare(name, capsys):
    """Compare the results of two ranks after a change."""
    check, change, agrees = CHANGES[name]
    parts = [(at, part(check, at)) for at in (list(range(31)), list(range(31, 61)))]
    change(parts)
    verdict = compare(check, by_definition(check), parts)
    assert verdict.agrees == agrees, verdict
    assert verify.report([verdict]) == (0 if agrees else 1)
    assert ("DIFFERS" in capsys.readouterr().out) != agrees


def test_nothing_compared_is_no_agreement(capsys):
    assert verify.report([]) == 1


def test_errors_are_relative_and_by_dtype():
    assert Verdict(CALL, dict.fromkeys(CALL.names, 1e-11)).agrees
    assert not Verdict(CALL, dict.fromkeys(CALL.names, 1e-9)).agrees
    assert not Verdict(CALL, {"out": 0.0}).agrees  # the other tensors are missing
    single = Check("ragged", 61, dtype="float32")
    verdict = compare(single, by_definition(single), [(list(range(61)), alone(single, "cpu"))])
    assert verdict.agrees and max(verdict.errors.values()) > 1e-9


@pytest.mark.parametrize("ranks", [2, 4])
def test_matrix(ranks):
    """The matrix has every exchange, layout and head size, and no butterfly where it cannot serve the call."""
    checks = matrix(ranks, ["float64"])
    assert {c.exchange for c in checks} == {"gather", "ring", "switch", "butterfly", "auto"}
    assert {c.head_size for c in checks if c.pattern == "one head"} == set(range(1, ranks + 1)) - {3}
    assert {c.layout for c in checks} == {"contiguous", "zigzag", "strided"}
    assert {c.seq_len for c in checks} == {64, 61} and {c.causal for c in checks} == {True, False}
    assert len(checks) == len(set(checks)) and all(c.served(ranks) for c in checks if c.pattern != "LongNetLM")
    assert not Check("ragged", 61, exchange="butterfly").served(ranks)


# -- ranks -------------------------------------------------------------------------------------------------------------
def troubled(rank, device, kind):
    """Yield a result. Then rank 1 dies or raises while the others wait for it, or all ranks hang."""
    yield rank
    if rank == 1 and kind == "dies":
        os._exit(7)
    if rank == 1 and kind == "raises":
        raise ValueError("bad luck")
    torch.distributed.barrier()
    time.sleep(60 * (kind == "hangs"))


TROUBLE = {
    "dies": (100.0, "rank 1 died with exit code 7 (after 1 results)"),
    "hangs": (2.0, "ranks [0, 1] did not finish within 2 s"),
}


@pytest.mark.parametrize("kind", [*TROUBLE, pytest.param("raises", marks=pytest.mark.slow)])
def test_trouble(forked_ranks, kind):
    timeout, says = TROUBLE.get(kind, (100.0, "rank 1 raised ValueError: bad luck"))
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as error:
        run_ranks(2, troubled, kind, timeout=timeout)
    assert says in str(error.value) and time.monotonic() - begin < 60, error.value
