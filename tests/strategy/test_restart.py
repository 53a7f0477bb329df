"""Under torchrun, the ranks of an attempt agree on a name that no other attempt has. Here, ranks are threads."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_dilated.strategy import mesh
from lightning_dilated.strategy.mesh import agree_on_token

LONG, SHORT = timedelta(seconds=20), timedelta(seconds=0.5)


@pytest.fixture(params=["hash", "tcp"])
def stores(request):
    """Return a function: `stores()` returns another client of the same store."""
    if request.param == "hash":
        shared = dist.HashStore()
        return lambda: shared
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    request.addfinalizer(lambda: server)  # keeps the server alive
    return lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


def attempt(stores, world, ranks=None, timeout=LONG, late=()):
    """Return the token or the error message of each rank. `late` ranks start after the other ranks."""
    rank_tokens = {}

    def one(rank):
        time.sleep(0.3 * (rank in late))
        try:
            rank_tokens[rank] = agree_on_token(stores(), rank, world, timeout)
        except RuntimeError as error:
            rank_tokens[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks or range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a rank still waits"
    return rank_tokens


@pytest.mark.parametrize("late", [(), (0,), (1, 2)])
def test_all_ranks_get_one_token(stores, late):
    first, again = attempt(stores, 4, late=late), attempt(stores, 4, late=late)
    assert len(first) == len(again) == 4
    assert len(set(first.values())) == 1 and len(set(again.values())) == 1
    assert first[0] != again[0]


def test_restart_counts_do_not_matter(stores, monkeypatch):
    """Restart counts differ between nodes. Here ranks are threads with one environment, so reading it would raise."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "not a number")
    assert len(set(attempt(stores, 2).values())) == 1


@pytest.mark.parametrize("missing", [[2], [1, 3]])
def test_every_rank_names_those_that_never_came(stores, missing):
    came = [rank for rank in range(4) if rank not in missing]
    outcomes = attempt(stores, 4, came, SHORT)
    assert sorted(outcomes) == came
    for rank, words in outcomes.items():
        assert words.startswith(f"rank {rank} of the job waited 0.5 seconds in vain for ranks {missing} of the job"), (
            words
        )
        assert "longer timeout" in words and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words


def test_rank_0_never_comes(stores):
    outcomes = attempt(stores, 3, [1, 2], SHORT)
    assert all("in vain for ranks [0] of the job" in words for words in outcomes.values()) and len(outcomes) == 2


def test_an_attempt_that_died_in_the_middle_does_no_harm(stores):
    """Ranks 1 and 2 registered, and rank 1 received its token. Then all ranks were killed."""
    died = attempt(stores, 4, [0, 1, 2], SHORT)
    assert all("[3]" in words for words in died.values())
    keys = dist.PrefixStore("lightning-dilated/token/4", stores())
    keys.set("hello/3", "said by a process that is dead")
    assert len(set(attempt(stores, 4, late=(3,)).values())) == 1


def test_a_dead_ranks_hello_does_not_count(stores):
    keys = dist.PrefixStore("lightning-dilated/token/2", stores())
    keys.set("hello/1", "dead")
    assert "in vain for ranks [1] of the job" in attempt(stores, 2, [0], SHORT)[0]


def test_one_node_fewer(stores):
    """The remaining ranks have new numbers, and the store still has keys of the larger job."""
    before = attempt(stores, 3)
    after = attempt(stores, 2, late=(1,))
    assert len(set(after.values())) == 1 and after[0] != before[0]


def test_one_rank_needs_nobody(stores):
    assert len(agree_on_token(stores(), 0, 1, SHORT)) == 32


def test_error_names_the_store(monkeypatch):
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **options: (_ for _ in ()).throw(dist.DistNetworkError("no")))
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "1234")
    with pytest.raises(RuntimeError, match=r"rank 3 of the job found no store at node7:1234 within 0.5 seconds"):
        mesh._store(3, SHORT)


def test_only_under_torchrun(monkeypatch):
    """Other launchers create a new store for each start, so they need no names."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    mesh.join_under_torchrun("gloo", SHORT, mesh.torch.device("cpu"))
    assert not dist.is_initialized()
