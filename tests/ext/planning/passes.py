"""Count the bytes that operators read and write."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Passes(TorchDispatchMode):
    """Counts the bytes that operators read and write, in tensors with a dimension `size`. Views do not count."""

    def __init__(self, size):
        super().__init__()
        self.size, self.seen = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        view = any(r.alias_info is not None for r in func._schema.returns) and not func._schema.is_mutable
        if func._schema.name != "aten::_unsafe_view" and not view:
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            self.seen += sum(x.nbytes for x in tensors if self.size in x.shape)
        return out
