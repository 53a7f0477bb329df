"""A checkpoint folder belongs to one run. A second run is refused with the holder's name, unless the holder is dead."""

import json
import multiprocessing
import os
import threading
import time

import pytest
from lightning.pytorch import Callback

from lightning_dilated.ext.checkpoints import folder_lock
from lightning_dilated.ext.checkpoints.folder_lock import NAME, FolderInUse, FolderLock
from lightning_dilated.ext.checkpoints.sharded_checkpoint import ShardedCheckpoint

from ...strategy.runs import launched
from .checkpoint_runs import STEPS, names, on_rank, run

pytestmark = pytest.mark.full


def hold(folder, told):
    """Hold the folder until the process is killed."""
    FolderLock(folder).acquire()
    told.send("held")
    time.sleep(600)


@pytest.fixture
def start_holder():
    """Return a function that starts another process as the holder of a folder."""
    forks, started = multiprocessing.get_context("fork"), []

    def start(folder):
        here, there = forks.Pipe()
        started.append(forks.Process(target=hold, args=(folder, there), daemon=True))
        started[-1].start()
        assert here.recv() == "held"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def holder(start_holder, tmp_path):
    """Another process that holds the lock on the test's folder."""
    return start_holder(tmp_path)


@pytest.fixture
def quick(monkeypatch):
    """Write a heartbeat every 0.1 s, and count a holder as dead after 0.6 s without a heartbeat."""
    monkeypatch.setattr(folder_lock, "_BEAT", 0.1)
    monkeypatch.setattr(folder_lock, "_DEAD", 0.6)


def elsewhere(folder, **changes):
    """Rewrite the lock as if its holder were on another host."""
    record = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps({**record, "table": "another", "host": "node7", **changes}))


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != NAME}


# -- on this host ------------------------------------------------------------------------------------------------------
def test_the_second_is_told_and_touches_nothing(text, saved, copied, tmp_path, quick, start_holder):
    """A second run, fresh or resumed, changes no file. If the first process is dead, the second run gets the folder."""
    process = start_holder(copied)
    (copied / ".step-00000005.partial").mkdir()
    (copied / ".step-00000005.partial" / "x").write_text("being written")
    before, listed = content(copied), names(copied)
    for resume in ("auto", "never"):
        words = rf"cannot use the folder {copied}: FolderInUse: it is in use by process {process.pid} on .* \(since 20.* UTC"
        with pytest.raises(OSError, match=words):
            run(text, STEPS, ShardedCheckpoint(str(copied), resume=resume))
        assert content(copied) == before and names(copied) == listed
    process.kill()
    while json.loads((copied / NAME).read_text())["began"] == folder_lock._began(process.pid):
        time.sleep(0.05)  # a zombie: nobody waits for the dead process, so its number still exists
    run(text, STEPS, ShardedCheckpoint(str(copied), resume="auto", keep=1))
    assert names(copied) == ["step-00000006"]


def test_a_number_that_is_used_again(tmp_path):
    """Another process got the holder's process number. Its start time differs, so the holder is dead."""
    FolderLock(tmp_path).acquire()
    record = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps({**record, "token": "of the dead", "began": "1"}))
    lock = FolderLock(tmp_path)
    lock.acquire()
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    lock.release()
    assert names(tmp_path) == []


def test_released_once_and_by_its_owner_only(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    fork = multiprocessing.get_context("fork").Process(target=first.release)
    fork.start()
    fork.join()
    second.release()  # this lock was never acquired
    with pytest.raises(FolderInUse, match=f"process {os.getpid()} on"):
        second.acquire()
    first.release()
    third = FolderLock(tmp_path)
    third.acquire()
    first.release()
    with pytest.raises(FolderInUse):
        FolderLock(tmp_path).acquire()
    third.release()


def test_of_many_one_gets_it(tmp_path):
    """Several processes try to lock a new folder, or one with a dead holder, at the same moment. Exactly one succeeds."""
    for round in range(20):
        if round % 2:
            record = {"token": "dead", "pid": 1, "began": "0", "table": folder_lock._process_table()}
            (tmp_path / NAME).write_text(json.dumps(record))
        got, refused, gate = [], [], threading.Barrier(8)

        def attempt(got=got, refused=refused, gate=gate):
            lock = FolderLock(tmp_path)
            gate.wait()
            try:
                lock.acquire()
                got.append(lock)
            except FolderInUse:
                refused.append(lock)

        threads = [threading.Thread(target=attempt) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(got), len(refused)) == (1, 7)
        got[0].release()
        assert names(tmp_path) == []


@pytest.mark.parametrize("fails", [False, True])
def test_released_at_the_end_of_a_fit(text, tmp_path, fails):
    """The lock is released at the end of a fit, even if the fit fails before or during training."""
    saver = ShardedCheckpoint(str(tmp_path))
    if fails:
        with pytest.raises(ZeroDivisionError):
            run(text, STEPS, saver, Raises(2))
    else:
        run(text, STEPS, saver)
    assert NAME not in names(tmp_path)
    (tmp_path / "step-00000001").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="holds checkpoints of another run"):
        run(text, STEPS, ShardedCheckpoint(str(tmp_path)))
    assert NAME not in names(tmp_path)


class Raises(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.step:
            raise ZeroDivisionError


# -- on another host ---------------------------------------------------------------------------------------------------
def test_a_holder_elsewhere_that_lives(tmp_path, quick):
    """The holder on another host is alive, although the clocks of the two hosts may differ by years."""
    first = FolderLock(tmp_path)
    first.acquire()
    elsewhere(tmp_path)
    os.utime(tmp_path / NAME, (0, 0))
    with pytest.raises(FolderInUse, match=r"process .* on node7"):
        FolderLock(tmp_path).acquire()
    first.release()


@pytest.mark.parametrize("clock", [0, 4e9])
def test_a_holder_elsewhere_that_is_dead(tmp_path, quick, clock, caplog):
    (tmp_path / NAME).write_text(json.dumps({"token": "dead", "pid": os.getpid(), "table": "another", "host": "node7"}))
    os.utime(tmp_path / NAME, (clock, clock))
    began, lock = time.monotonic(), FolderLock(tmp_path)
    lock.acquire()
    assert time.monotonic() - began >= 0.6
    lock.release()
    assert "on node7 (since None). Watching it for up to 0.6 seconds" in caplog.text


def test_a_holder_elsewhere_that_ends_meanwhile(tmp_path, quick):
    (tmp_path / NAME).write_text(json.dumps({"token": "ends", "pid": os.getpid(), "table": "another"}))
    threading.Timer(0.15, (tmp_path / NAME).unlink).start()
    began, lock = time.monotonic(), FolderLock(tmp_path)
    lock.acquire()
    assert time.monotonic() - began < 0.6
    lock.release()


@pytest.mark.parametrize("stale", [False, True])
def test_a_newcomer_that_died_while_it_took_over(tmp_path, quick, stale):
    (tmp_path / NAME).write_text(
        json.dumps({"token": "dead", "pid": 1, "began": "0", "table": folder_lock._process_table()})
    )
    lock = FolderLock(tmp_path)
    lock._claim("dead" if stale else "another").touch()
    lock.acquire()
    lock.release()
    assert len(names(tmp_path)) == (not stale)


@pytest.mark.parametrize("what", ["", "[]", "{}", "link", "loop"])
def test_a_file_that_says_nothing(tmp_path, quick, what):
    """A file without a readable record counts as the lock of an unknown holder."""
    (target := tmp_path / "target").write_text("kept")
    if what in ("link", "loop"):
        (tmp_path / NAME).symlink_to(target if what == "link" else tmp_path / NAME)
    else:
        (tmp_path / NAME).write_text(what)
    lock = FolderLock(tmp_path)
    lock.acquire()
    lock.release()
    assert names(tmp_path) == ["target"] and target.read_text() == "kept"


def test_who_was_taken_over_ends(text, tmp_path, quick):
    """A process that was suspended for a long time has to stop, because its successor now writes to the folder."""

    class Loses(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 1:
                elsewhere(tmp_path, token="successor", pid=4)
                lock = trainer.checkpoint_callback._lock
                while lock._lost is None:
                    time.sleep(0.02)

    with pytest.raises(OSError, match="FolderInUse: it was taken over by process 4 on node7"):
        run(text, STEPS, ShardedCheckpoint(str(tmp_path), every_n_train_steps=2), Loses())
    assert names(tmp_path) == [NAME]  # the lock file of the successor


def test_a_file_that_was_removed_comes_back(tmp_path, quick):
    lock = FolderLock(tmp_path)
    lock.acquire()
    (tmp_path / NAME).unlink()
    while not (tmp_path / NAME).exists():
        time.sleep(0.02)
    lock.release()
    time.sleep(0.3)
    assert names(tmp_path) == []


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def link(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    lock = FolderLock(tmp_path)
    lock.acquire()
    with pytest.raises(FolderInUse):
        FolderLock(tmp_path).acquire()
    lock.release()
    assert names(tmp_path) == []


# -- ranks -------------------------------------------------------------------------------------------------------------
def refused(rank, group, text, saved):
    launched(rank)
    try:
        on_rank(rank, group, text, STEPS, saved, strategy="ring_dilated")
    except OSError as error:
        return str(error)
    return ""


def test_all_ranks_are_refused(pool, text, tmp_path, holder):
    """All ranks share one lock, so all are refused."""
    for message in pool.run(2, refused, text, {"folder": str(tmp_path)}):
        assert f"in use by process {holder.pid} on" in message
    assert names(tmp_path) == [NAME]
    holder.kill()
    holder.join()
    assert pool.run(2, refused, text, {"folder": str(tmp_path)}) == ["", ""]
    assert names(tmp_path) == ["step-00000006"]


def test_a_process_that_may_not_be_looked_at_is_not_dead(tmp_path, quick, monkeypatch):
    """A host may hide other users' processes. In this case the heartbeats in the file decide."""
    lock = FolderLock(tmp_path)
    lock.acquire()
    try:
        monkeypatch.setattr(folder_lock, "_began", lambda pid: None)
        with pytest.raises(FolderInUse, match=str(os.getpid())):
            FolderLock(tmp_path).acquire()
    finally:
        lock.release()
