"""Settings of all tests: reproducible random cases, one thread, and GPU tests that are skipped without a GPU."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; workers share the cores of CI

os.environ["LIGHTNING_DILATED_LINKS"] = "defaults"  # ignore a file of links measured on this machine

import pytest
from hypothesis import HealthCheck, settings

from .examples import examples

gc.disable()  # until tests run: a collection would visit all objects that importing torch and test files creates
# A forked process lacks the threads of its parent's process groups, and collecting such a group there aborts.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=gc.collect)
# functions below import torch and the package, because xdist's controller needs neither
# background jobs of a shell ignore SIGINT, and their child processes inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: the slowest files, by .ci/longest.py: xdist starts them first, so that none of them runs alone at the end
LONGEST = (Path(__file__).parent / "longest.txt").read_text().split()
#: fixtures that start worker processes
STARTS_PROCESSES = {"pool", "pools", "interpreter"}
#: environment variables that a launcher sets for its processes
LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE")


def pytest_configure(config: pytest.Config) -> None:
    """Set the share of random examples: with `-m fast` a tenth, unless LIGHTNING_DILATED_EXAMPLES is set.

    CI runs the same examples every time. HYPOTHESIS_PROFILE=explore draws new ones.
    """
    if hasattr(config.option, "loadscopereorder"):  # xdist's own order: the number of tests
        config.option.loadscopereorder = False
    if config.option.markexpr == "fast":
        os.environ.setdefault("LIGHTNING_DILATED_EXAMPLES", "0.1")
    common = {"max_examples": examples(100), "deadline": None, "print_blob": True}
    common["suppress_health_check"] = [HealthCheck.too_slow]
    settings.register_profile("ci", derandomize=True, **common)
    settings.register_profile("explore", derandomize=False, **common)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before -m selects, mark tests with worker processes `full`, and tests that are not full, slow or gpu `fast`.

    Skip `gpu` tests without a GPU.
    Under xdist, the slowest files come first.
    """
    import torch

    torch.set_num_threads(1)
    if "PYTEST_XDIST_WORKER" in os.environ:
        order = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))
    for item in items:
        if STARTS_PROCESSES & set(item.fixturenames):
            item.add_marker("full")
        if not any(item.get_closest_marker(name) for name in ("full", "slow", "gpu")):
            item.add_marker("fast")
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Exclude imported objects from later garbage collections, which spent a tenth of the CPU time on them."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After each file, exclude objects that are still in use (compiled code, caches) from later collections."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Unfreeze the heap before the interpreter ends, because extensions report frozen objects as leaks."""
    gc.unfreeze()
    if "PYTEST_XDIST_WORKER" in os.environ:
        gc.disable()  # a long collection at exit could be interrupted, which would be reported


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Give every test the same random state and an empty cache of resolved calls."""
    import torch

    from lightning_dilated.attention import resolve

    torch.manual_seed(0)
    resolve.forget()


@pytest.fixture(autouse=True)
def no_process_group_left():
    """After each test, destroy the process group and restore MASTER_PORT etc., which Lightning would leave changed."""
    import torch

    before = {name: os.environ.get(name) for name in LAUNCHED}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
