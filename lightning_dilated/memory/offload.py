"""Offloads saved tensors to pinned host memory until the backward; copies overlap with computation.

A copy to the host starts as soon as the tensor is computed. The tensor is freed when the next copy starts, in the order
of the computing stream, so that at most two tensors are on the GPU even if the host runs ahead. The backward copies
the next tensor back while it uses the current one or, with groups of blocks, while it runs a group's first block.
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
#: if no free buffer fits and all buffers together would exceed ROOM times the peak use, the free buffers are released
ROOM = 4
#: the buffers that are registered with CUDA
_PINNED: weakref.WeakSet[_Buffer] = weakref.WeakSet()


def pinned_bytes() -> int:
    """Return the bytes of host memory registered for saved tensors by this process, without torch's pinned memory."""
    return sum(buffer.size for buffer in list(_PINNED))


def check_offload(offload: Any) -> float:
    """Return a checked budget: a fraction of the saved tensors if it is up to 1, else GiB of host memory."""
    hint = " 0 is none; up to 1 is a fraction of the saved block inputs; above 1 is GiB."
    return real(offload, "offload", least=0, hint=hint)


class Host:
    """Host memory for the saved tensors of one device; `budget`: see `check_offload`."""

    def __init__(self, budget: float) -> None:
        self.budget = check_offload(budget)
        self._free: list[_Buffer] = []
        self._total, self._most = 0, 0  # bytes of all buffers; peak of the bytes in use
        self._order: list[Callable[[], _Offloaded | None]] = []  # the tensors of the latest forward, by number
        self._waiting: weakref.WeakSet[_Offloaded] = weakref.WeakSet()  # tensors of all forwards
        self._leaving: _Offloaded | None = None
        self._stream: torch.cuda.Stream | None = None

    def __reduce__(self) -> tuple[type[Host], tuple[float]]:
        """Copy and pickle without the buffers, because buffers in use belong to forwards of this object."""
        return Host, (self.budget,)

    @property
    def bytes(self) -> int:
        """The bytes of host memory in all buffers, in use or free."""
        return self._total

    def offloading(self, x: Tensor, number: int, count: int, deferred: bool = False) -> AbstractContextManager[None]:
        """Return a context in which x is copied to the host when autograd saves it.

        Args:
            number, count: x is the `number`-th of `count` tensors of this forward.
            deferred: when the backward uses x, do not copy back the tensor before x; `prefetch(number)` does this.
        """
        if number == 0:
            self._order.clear()
        budgeted = number < round(self.budget * count) if self.budget <= 1 else self._fits(x)
        saved = x.requires_grad and torch.is_grad_enabled() and x.numel() > 0  # an empty shard has no data to copy
        if not (budgeted and saved):
            self._release_leaving()
            return contextlib.nullcontext()
        self._order += [_not_offloaded] * (number - len(self._order))  # tensors that stay on the GPU
        return self._hooks(x, deferred)

    def _fits(self, x: Tensor) -> bool:
        if self._fitting(x.nbytes) is None and self._total + x.nbytes > self.budget * GIB:
            self._free_buffers()  # no free buffer has a suitable length
        return self._fitting(x.nbytes) is not None or self._total + x.nbytes <= self.budget * GIB

    def _free_buffers(self) -> None:
        """Release the free buffers after all queued copies have finished."""
        if self._stream is not None:
            self._stream.synchronize()
        self._total -= sum(buffer.size for buffer in self._free)
        self._free.clear()

    def close(self) -> None:
        """Release all host memory; a backward that still needs a tensor in it then raises RuntimeError."""
        if self._stream is not None:
            with contextlib.suppress(RuntimeError):  # a GPU that has failed raises again and copies nothing
                self._stream.synchronize()
        self._leaving = None
        for offloaded in list(self._waiting):
            offloaded.forget()
        self._free.clear()
        self._order.clear()
        self._total = self._most = 0

    def _fitting(self, size: int) -> _Buffer | None:
        """Return the smallest free buffer of `size` to 1.25 `size` bytes; None if there is none."""
        buffers = [buffer for buffer in self._free if size <= buffer.size <= 1.25 * size]
        return min(buffers, key=lambda buffer: buffer.size, default=None)

    @contextlib.contextmanager
    def _hooks(self, x: Tensor, deferred: bool) -> Iterator[None]:
        where, x_size, dtype = x.data_ptr(), x.shape, x.dtype

        def pack(t: Tensor) -> Tensor | _Offloaded:
            same = t.data_ptr() == where and t.shape == x_size and t.dtype == dtype and t.is_contiguous()
            return self._send(t, deferred) if same else t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.restore() if isinstance(t, _Offloaded) else t):
            yield

    def _send(self, x: Tensor, deferred: bool) -> _Offloaded:
        """Start the copy of x to the host, and free the tensor that was copied before x."""
        last = self._order[-1]() if self._order else None
        if last is not None and last.where == x.data_ptr() and last.tensor is not None:
            return last  # autograd saves the same x again
        offloaded = _Offloaded(self, x, len(self._order), deferred)
        self._order.append(weakref.ref(offloaded))
        self._release_leaving()
        self._leaving = offloaded
        self._waiting.add(offloaded)
        return offloaded

    def _release_leaving(self) -> None:
        """Free the GPU memory of the last copied tensor; it is reused only after the copy has finished."""
        if self._leaving is not None:
            self._leaving.release()
            self._leaving = None

    def forget_copy(self, offloaded: _Offloaded) -> None:
        """Forget a tensor that was restored before it was freed on the GPU."""
        if self._leaving is offloaded:
            self._leaving = None

    def prefetch(self, number: int) -> None:
        """Start to copy back the tensor that was saved before the `number`-th: the backward needs it next."""
        before = self._order[number - 1]() if 0 < number <= len(self._order) else None
        if before is not None:
            before.fetch()

    def take(self, size: int) -> _Buffer:
        """Return a buffer of at least `size` bytes."""
        buffer = self._fitting(size)
        used = self._total - sum(free.size for free in self._free) + (size if buffer is None else buffer.size)
        self._most = max(self._most, used)
        if buffer is None:
            if self._total + size > ROOM * self._most:  # sequences became longer, and earlier buffers are too small
                self._free_buffers()
            buffer = _Buffer(size, self.on_gpu)
            self._total += size
        else:
            self._free.remove(buffer)
        return buffer

    def put(self, buffer: _Buffer) -> None:
        """Keep a free buffer for later tensors."""
        self._free.append(buffer)

    on_gpu = False

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of copies; one stream for both directions reads a buffer before it overwrites the buffer."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream


def _not_offloaded() -> None:
    """Return None, like a dead reference, for a tensor that stays on the GPU."""


class _Buffer:
    """Host memory that this class registers with CUDA, because torch would round pinned memory up to a power of two."""

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
                "ActivationRecompute (each rank of this machine uses as much), or set every=2."
            ) from error


def _unregister(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class _Offloaded:
    """A tensor in host memory; `restore` copies it back to its device."""

    def __init__(self, host: Host, x: Tensor, number: int, deferred: bool) -> None:
        self._host, self.number, self.where, self._deferred = host, number, x.data_ptr(), deferred
        self._like = x.dtype, x.shape, x.device
        host.on_gpu = x.device.type == "cuda"
        self._buffer, self._done = host.take(x.nbytes), None
        self.tensor: Tensor | None = x.detach()
        with self._on_copy_stream():
            self._flat().copy_(self.tensor, non_blocking=True)

    def __del__(self) -> None:
        buffer = getattr(self, "_buffer", None)
        if buffer is None:
            return
        if getattr(self, "tensor", None) is not None:
            self._wait()  # a copy may still run, and must finish before the buffer is reused
        self._host.put(buffer)

    def forget(self) -> None:
        """Drop the buffer and the tensor, which then cannot be restored."""
        self._buffer = self.tensor = None

    def _flat(self) -> Tensor:
        dtype, shape, _ = self._like
        return self._buffer.memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    @contextlib.contextmanager
    def _on_copy_stream(self) -> Iterator[None]:
        """Queue the body's work on the stream of copies, after all work on the current stream."""
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

    def release(self) -> None:
        """Free the tensor on the device; the current stream reuses its memory only after the copy to the host."""
        self._wait()
        self.tensor = None

    def fetch(self) -> None:
        """Start to copy the tensor back."""
        if self.tensor is None:
            if self._buffer is None:
                raise RuntimeError(
                    "a saved block input is no longer in host memory, which was freed at the end of training."
                )
            dtype, shape, device = self._like
            self.tensor = torch.empty(shape, dtype=dtype, device=device)
            with self._on_copy_stream():
                self.tensor.copy_(self._flat(), non_blocking=True)

    def restore(self) -> Tensor:
        """Return the tensor on its device; unless `deferred`, start to copy back the tensor that is needed next."""
        self.fetch()
        self._wait()
        tensor, self.tensor = self.tensor, None
        self._host.forget_copy(self)
        if not self._deferred:
            self._host.prefetch(self.number)
        return tensor
