"""Saved tensors in pinned host memory while they wait for the backward, copied beside the computation.

A copy leaves as soon as the tensor is there, and the tensor is let go when the next one has left: in the order of the
computing stream, so that the host, which runs ahead, holds no more than two at a time. In the backward the next one is on
its way back while one is used; of groups of blocks, while a group's first block is.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_dilated._validation import real

GIB = 2**30
#: bytes of all buffers, in those that were in use at a time, beyond which free ones are given up for one of another length
ROOM = 4
#: buffers that are registered with CUDA
_PINNED: weakref.WeakSet[_Buffer] = weakref.WeakSet()


def pinned_bytes() -> int:
    """Of host memory that this process has registered for saved tensors, beside torch's own pinned memory."""
    return sum(buffer.size for buffer in list(_PINNED))


def check_offload(offload: Any) -> float:
    """The budget: 0 for none, up to 1 a fraction of what is saved, above 1 GiB of host memory."""
    hint = " 0 is none; up to 1 is a fraction of the saved block inputs; above 1 is GiB."
    return real(offload, "offload", least=0, hint=hint)


class Host:
    """Where saved tensors of one device wait.

    Args:
        budget: see `check_offload`.
    """

    def __init__(self, budget: float) -> None:
        self.budget = check_offload(budget)
        self._free: list[_Buffer] = []
        self._held, self._most = 0, 0  # bytes of all buffers; of those in use, the most at a time
        self._order: list[Callable[[], _Away | None]] = []  # by their numbers in the forward
        self._waiting: weakref.WeakSet[_Away] = weakref.WeakSet()  # of all forwards
        self._leaving: _Away | None = None
        self._stream: torch.cuda.Stream | None = None

    def __reduce__(self) -> tuple[type[Host], tuple[float]]:
        """Copies, pickled ones too, begin without buffers: what waits belongs to forwards of this one."""
        return Host, (self.budget,)

    @property
    def bytes(self) -> int:
        """Of host memory, taken until `close`."""
        return self._held

    def keeping(self, x: Tensor, number: int, of: int, later: bool = False) -> AbstractContextManager[None]:
        """A context in which x, where autograd saves it, goes to the host; it is the `number`-th of `of` in this forward.

        With `later` the one before it does not start its way back with it, but when `ahead(number)` is called.
        """
        if number == 0:
            self._order.clear()
        budgeted = number < round(self.budget * of) if self.budget <= 1 else self._fits(x)
        saved = x.requires_grad and torch.is_grad_enabled() and x.numel() > 0  # an empty shard has nothing to send
        if not (budgeted and saved):
            self._let_leave()
            return contextlib.nullcontext()
        self._order += [_nobody] * (number - len(self._order))  # of those that stay
        return self._hooks(x, later)

    def _fits(self, x: Tensor) -> bool:
        if self._fitting(x.nbytes) is None and self._held + x.nbytes > self.budget * GIB:
            self._give_up()  # of other lengths
        return self._fitting(x.nbytes) is not None or self._held + x.nbytes <= self.budget * GIB

    def _give_up(self) -> None:
        """Free buffers go back to the system, when no copy that was asked for reads or writes them any more."""
        if self._stream is not None:
            self._stream.synchronize()
        self._held -= sum(buffer.size for buffer in self._free)
        self._free.clear()

    def close(self) -> None:
        """Give all memory back to the system, with tensors that still wait in it: there is no backward any more."""
        if self._stream is not None:
            with contextlib.suppress(RuntimeError):  # a GPU that failed says so again, and copies nothing
                self._stream.synchronize()
        self._leaving = None
        for away in list(self._waiting):
            away.forget()
        self._free.clear()
        self._order.clear()
        self._held = self._most = 0

    def _fitting(self, size: int) -> _Buffer | None:
        """The smallest free buffer for so many bytes that is not far too large."""
        found = [buffer for buffer in self._free if size <= buffer.size <= 1.25 * size]
        return min(found, key=lambda buffer: buffer.size, default=None)

    @contextlib.contextmanager
    def _hooks(self, x: Tensor, later: bool) -> Iterator[None]:
        where, x_size, dtype = x.data_ptr(), x.shape, x.dtype

        def pack(t: Tensor) -> Tensor | _Away:
            same = t.data_ptr() == where and t.shape == x_size and t.dtype == dtype and t.is_contiguous()
            return self._send(t, later) if same else t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.back() if isinstance(t, _Away) else t):
            yield

    def _send(self, x: Tensor, later: bool) -> _Away:
        """Start the copy of x; the tensor that left before is let go once its own is done."""
        last = self._order[-1]() if self._order else None
        if last is not None and last.where == x.data_ptr() and last.tensor is not None:
            return last  # saved twice
        away = _Away(self, x, len(self._order), later)
        self._order.append(weakref.ref(away))
        self._let_leave()
        self._leaving = away
        self._waiting.add(away)
        return away

    def _let_leave(self) -> None:
        """The tensor that left last is let go, once its copy is done."""
        if self._leaving is not None:
            self._leaving.left()
            self._leaving = None

    def let_go(self, away: _Away) -> None:
        """Forget a tensor that is back."""
        if self._leaving is away:
            self._leaving = None

    def ahead(self, number: int) -> None:
        """Start the way back of the tensor that was saved before the `number`-th, which the backward asks for after it."""
        before = self._order[number - 1]() if 0 < number <= len(self._order) else None
        if before is not None:
            before.fetch()

    def take(self, size: int) -> _Buffer:
        """Host memory of so many bytes."""
        found = self._fitting(size)
        used = self._held - sum(buffer.size for buffer in self._free) + (size if found is None else found.size)
        self._most = max(self._most, used)
        if found is None:
            if self._held + size > ROOM * self._most:  # as sequences grow longer, none before would ever fit
                self._give_up()
            found = _Buffer(size, self.on_gpu)
            self._held += size
        else:
            self._free.remove(found)
        return found

    def put(self, buffer: _Buffer) -> None:
        """Give memory back, for later tensors."""
        self._free.append(buffer)

    on_gpu = False

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of copies, one for both directions, so that memory that was read is written after."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream


def _nobody() -> None:
    """In place of a tensor that did not leave."""


class _Buffer:
    """Bytes of host memory; registered with CUDA, since torch's own pinned memory comes in powers of two."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.size = size
        try:
            self.memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            if pinned:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), size, 0))
                weakref.finalize(self, _unregister, self.memory)
                _PINNED.add(self)
        except RuntimeError as error:
            raise RuntimeError(
                f"offload could not get {size / GIB:.2f} GiB more of (pinned) host memory: {error}. Lower offload of "
                "ActivationRecompute, which is what all ranks of this machine take each, or set every=2."
            ) from error


def _unregister(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class _Away:
    """A tensor on the host; `back` brings it to its device."""

    def __init__(self, host: Host, x: Tensor, number: int, later: bool) -> None:
        self._host, self.number, self.where, self._later = host, number, x.data_ptr(), later
        self._like = x.dtype, x.shape, x.device
        host.on_gpu = x.device.type == "cuda"
        self._buffer, self._done = host.take(x.nbytes), None
        self.tensor: Tensor | None = x.detach()
        with self._beside():
            self._flat().copy_(self.tensor, non_blocking=True)

    def __del__(self) -> None:
        buffer = getattr(self, "_buffer", None)
        if buffer is None:
            return
        if (
            getattr(self, "tensor", None) is not None
        ):  # on its way back, and nobody asked: memory is reused after the copy
            self._wait()
        self._host.put(buffer)

    def forget(self) -> None:
        """Let go of what waits, without a way back."""
        self._buffer = self.tensor = None

    def _flat(self) -> Tensor:
        dtype, shape, _ = self._like
        return self._buffer.memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On the stream of copies, after what was asked for so far."""
        if not self._host.on_gpu:
            yield
            return
        stream = self._host.stream(self._like[2])
        stream.wait_stream(torch.cuda.current_stream(self._like[2]))
        with torch.cuda.stream(stream):
            yield
            self._done = stream.record_event()

    def _wait(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream(self._like[2]).wait_event(self._done)

    def left(self) -> None:
        """Let the tensor go: its memory is taken again by what this stream does after the copy."""
        self._wait()
        self.tensor = None

    def fetch(self) -> None:
        """Start the way back."""
        if self.tensor is None:
            if self._buffer is None:
                raise RuntimeError(
                    "a saved block input is no longer in host memory: it was given back as training ended."
                )
            dtype, shape, device = self._like
            self.tensor = torch.empty(shape, dtype=dtype, device=device)
            with self._beside():
                self.tensor.copy_(self._flat(), non_blocking=True)

    def back(self) -> Tensor:
        """The tensor; the one that is needed next starts its way, unless told so later."""
        self.fetch()
        self._wait()
        found, self.tensor = self.tensor, None
        self._host.let_go(self)
        if not self._later:
            self._host.ahead(self.number)
        return found
