"""Settings of the whole suite: reproducible random cases, one thread, and GPU tests that skip without a GPU."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: CI shares its cores between workers

os.environ["LIGHTNING_DILATED_LINKS"] = "defaults"  # not a file of this machine's measurements

import pytest
from hypothesis import HealthCheck, settings

from .examples import examples

gc.disable()  # until tests run: a collection visits all objects that torch and the test files make at their import
# A fork has none of its parent's threads for process groups: collecting such a group there aborts. So collect before.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=gc.collect)
# functions below import torch and the package, because xdist's controller needs neither
# a background job of a shell ignores SIGINT, and so do the processes that it starts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: files that take longest, by .ci/longest.py: xdist starts them first, or one would run alone at the end
LONGEST = (Path(__file__).parent / "longest.txt").read_text().split()
#: fixtures that start worker processes
STARTS_PROCESSES = {"pool", "pools", "interpreter"}
#: variables that a launcher sets for its processes
LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE")


def pytest_configure(config: pytest.Config) -> None:
    """`-m fast` tries a tenth of the random examples, unless LIGHTNING_DILATED_EXAMPLES sets another share.

    CI runs the same examples every time; HYPOTHESIS_PROFILE=explore looks for new ones.
    """
    if hasattr(config.option, "loadscopereorder"):  # files with the most tests are not the slowest
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
    """Mark tests with worker processes `full`, other cheap ones `fast`, before -m selects; skip `gpu` without a GPU.

    Under xdist the longest files come first.
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
    """Exclude imported objects from every later garbage collection, where they took a tenth of the processor's time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After each file, exclude the objects still in use from later collections: they are compiled code and caches."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter end without a frozen heap: extensions report remaining objects as leaks."""
    gc.unfreeze()
    if "PYTEST_XDIST_WORKER" in os.environ:
        gc.disable()  # an interrupt during a long collection at the end would be reported


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Give every test the same random state and an empty cache of resolved calls."""
    import torch

    from lightning_dilated.attention import resolve

    torch.manual_seed(0)
    resolve.forget()


@pytest.fixture(autouse=True)
def no_process_group_left():
    """Lightning leaves its process group, and MASTER_PORT and the like, to later tests and their processes."""
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
