"""Attention over a sequence chunk by chunk. The keys and values of a chunk are overwritten after its computation."""

import torch

from lightning_dilated.attention.functional import op_arguments
from lightning_dilated.ext.streams.stream import Stream


class Chunks:
    """A causal case that is computed in chunks of C tokens, first in ascending and then in descending order.

    Args:
        windows: (first, stop) of each window of heads.
        group: (the ranks that share each chunk, this rank), or None for one rank.
    """

    def __init__(self, case, chunk, dropout=0.0, windows=((0, None),), group=None):
        self.case, self.stream, self.windows = case, Stream(), windows
        self.options = {**case.options(), "dropout": dropout}
        self.seed = torch.randint(2**62, (), dtype=torch.int64)
        self.stream.begin(case.seq_len, chunk, store=True, group=group)
        self.rows = []

    def attend(self, tensors, i):
        """Return the output of chunk i."""
        case, (layer,) = self.case, self.stream.layers(i, [self.seed])
        parts = []
        for first, stop in self.windows:
            stop, group = stop or case.heads, case.heads // case.kv_heads
            q, *kv = tensors
            q, kv = q[:, :, first:stop], [x[:, :, first // group : stop // group] for x in kv]
            window = (first, case.heads, case.kv_heads) if len(self.windows) > 1 else ()
            arguments = op_arguments(q, *kv, case.pattern, **self.options, window=window, chunk=layer)
            parts.append(torch.ops.lightning_dilated.attention(*arguments)[0])
        return torch.cat(parts, 2)

    def run(self, q, k, v, grad):
        """Return (out, dq, dk, dv) for the positions of this rank. Later chunks can read only carried rows."""
        cut = lambda x, i: x[:, self.stream.tokens(i).start : self.stream.tokens(i).stop].detach().clone()  # noqa: E731
        outs, grads, last = {}, {}, self.stream.chunks - 1
        with torch.no_grad():
            for i in range(last):
                chunk = [cut(x, i) for x in (q, k, v)]
                outs[i] = self.attend(chunk, i)
                for x in chunk:
                    x.fill_(torch.nan)
        self.stream.descend()
        for i in range(last, -1, -1):
            chunk = [cut(x, i).requires_grad_() for x in (q, k, v)]
            out = self.attend(chunk, i)
            if i < last:
                assert torch.equal(out, outs[i]), "the two passes differ"
            outs[i] = out.detach()
            grads[i] = torch.autograd.grad(out, chunk, cut(grad, i))
            self.rows.append(self.stream.rows_of(0, self.windows[0][0]).rows.shape[0])
        joined = [torch.cat([grads[i][j] for i in range(last + 1)], 1) for j in range(3)]
        return torch.cat([outs[i] for i in range(last + 1)], 1), *joined
