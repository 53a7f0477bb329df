"""Activation recomputation of a block: its input is kept, the rest is computed again when the backward comes.

Shape letters: B batch, N tokens, E embedding dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_dilated.attention import op as _op  # noqa: F401 - registers the op

#: "none" keeps all that the backward needs; "block" the block's input only; "attention-kept" also what the op gave (output,
#: log-sum-exp and the rows received from other ranks), so that neither attention nor exchange is done twice
POLICIES = ("none", "attention-kept", "block")


def check_policy(name: str) -> str:
    """`name`, or an error that lists the policies."""
    if name not in POLICIES:
        raise ValueError(f"the recompute policy must be one of {', '.join(POLICIES)}; got {name!r}.")
    return name


def guarded(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A compiled block, past a fault of torch before 2.13: an assertion that the number of rows that other ranks sent is no
    negative one stops the compilation of a backward that keeps them."""
    if torch.__version__ >= "2.13":  # a TorchVersion, which compares by numbers
        return compiled

    def run(*args: object, **kwargs: object) -> Tensor:
        if torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        with torch._dynamo.config.patch(do_not_emit_runtime_asserts=True):
            return compiled(*args, **kwargs)

    return run


def recomputed(run: Callable[[Tensor], Tensor], x: Tensor, policy: str) -> Tensor:
    """run(x) of (B, N, E), by torch's checkpoint (arXiv 1604.06174), also where torch.compile traces it."""
    if policy == "block":
        return checkpoint(run, x, use_reentrant=False)
    kept = [torch.ops.lightning_dilated.attention.default]
    return checkpoint(run, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, kept))
