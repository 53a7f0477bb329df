"""What operators read and write."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: operators that touch no memory, or products
LEFT_OUT = ("_unsafe_view", "mm", "addmm")


class Passes(TorchDispatchMode):
    """Adds up the bytes of tensors, all `sizes` of which are among theirs, that operators read and write; views are none.
    With `products` also those that products do."""

    def __init__(self, *sizes, products=True):
        super().__init__()
        self.sizes, self.left_out, self.seen = set(sizes), LEFT_OUT[: 1 if products else None], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        view = any(r.alias_info is not None for r in func._schema.returns) and not func._schema.is_mutable
        if name in self.left_out or view or name == "scatter_":  # which writes a number of each row
            return out
        given = () if name == "gather" else (args, kwargs)  # which reads one
        both = [x for x in tree_leaves((given, out)) if isinstance(x, torch.Tensor)]
        self.seen += sum(x.nbytes for x in both if self.sizes <= set(x.shape))
        return out
