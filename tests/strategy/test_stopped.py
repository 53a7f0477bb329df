"""If a rank stops, the other ranks end in time, even if destroying a process group blocks, as it does over NCCL."""

from pathlib import Path

import pytest

from ..distributed.forked import run_ranks

pytestmark = [pytest.mark.full, pytest.mark.slow]

JOB = Path(__file__).with_name("stopped_job.py")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("how", ["stop", "catch"])
def test_the_exit_has_a_limit(tmp_path, how, strategy):
    ended = run_ranks(2, JOB, how, "8", strategy, cwd=tmp_path, timeout=45)
    assert ended.codes == [1, None], ended.stderr[-3000:]
    assert "destroy_as_nccl" in ended.stderr, ended.stderr[-3000:]
    if how == "stop":
        assert "anks [1] of the job" in ended.stderr, ended.stderr[-3000:]
    else:
        assert ended.stdout == "the script continued\n"


def test_an_ordinary_exit_destroys_groups(tmp_path):
    ended = run_ranks(2, JOB, "nothing", "60", cwd=tmp_path)
    assert ended.codes == [0, 0], ended.stderr[-3000:]
    assert ended.stderr.count("destroying") >= 2 and "Timeout" not in ended.stderr
