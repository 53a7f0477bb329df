"""Count the memory of compiled blocks under fake tensors, with a model of the kernels that Inductor would generate.

Inductor's own partitioner decides what is saved for the backward. Counted matrix products and custom operators read
and write memory, and the operations between them are fused into the fewest kernels. Kernels over the same number
of elements that read a common tensor are fused, unless another step has to run between them. A kernel writes the values
that other kernels read. It overwrites an input if one of its results is the input's only remaining reader.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from lightning_dilated.attention.rotary import RotaryTable
from lightning_dilated.ext._compat import torch as compat
from lightning_dilated.ext.planning.counting.memory_tracker import Tape
from lightning_dilated.memory.recompute import KEPT
from lightning_dilated.models.blocks import TransformerBlock

#: operators of aten and prims that Inductor calls, like all custom operators, instead of generating a kernel
EXTERN = ("mm", "addmm", "bmm", "baddbmm", "embedding_dense_backward", "index_put", "convolution")
#: a value with several readers is written to memory if it has more inputs than this; otherwise each reader computes it
READS = 4


@dataclass
class Graphs:
    """A cache of compiled functions. `ready`: keys of batches that are compiled; `tape`: the tape that counts now."""

    tape: Tape
    compiled: dict[tuple, Callable[..., Any]] = field(default_factory=dict)
    ready: set[tuple] = field(default_factory=set)


class Kernels:
    """A compiled graph. A call takes a list of tensors and empties the list."""

    _boxed_call = True

    def __init__(self, graph: fx.GraphModule, graphs: Graphs) -> None:
        self.graphs, self.graph = graphs, graph
        self.nodes = list(graph.graph.nodes)
        self.written = {n for n in self.nodes if n.op == "call_function" and not _viewed(n) and self._is_written(n)}
        self.reads = {n: self._roots(n) for n in self.nodes if n in self.written or n.op == "output"}
        self.steps = self._ordered(self._fused())
        #: the last step that reads a value
        self.last: dict[fx.Node, int] = {}
        for i, step in enumerate(self.steps):
            for node in step:
                self.last.setdefault(node, i)
                self.last.update(dict.fromkeys(self.reads[node], i))

    # -- values kept in memory -----------------------------------------------------------------------------------------
    def _is_written(self, node: fx.Node) -> bool:
        if _extern(node):
            return True
        if not isinstance(node.meta.get("val"), Tensor):
            return False  # the node has several results; each result is a separate node, which is written
        users = list(_readers(node))
        if any(user.op == "output" or _extern(user) for user in users) or _numbers(node) < _width(node):
            return True
        return len(users) > 1 and len(_inputs(node)) > READS

    def _is_root(self, node: fx.Node) -> bool:
        return node.op != "call_function" or node in self.written or _of_operator(node)

    def _roots(self, node: fx.Node) -> set[fx.Node]:
        """Return the values in memory from which a kernel computes a node."""
        roots: set[fx.Node] = set()
        for n in node.all_input_nodes:
            roots |= {n} if self._is_root(n) else self._roots(n)
        return roots

    # -- values that one kernel computes -------------------------------------------------------------------------------
    def _fused(self) -> list[list[fx.Node]]:
        """Return the steps; each step is one operator, or lists the results of one kernel."""
        steps = [[n] for n in self.nodes if n in self.written]
        kernels = [step for step in steps if not _extern(step[0])]
        for a, b in itertools.combinations(kernels, 2):
            # lists are merged in place: `a` is empty if it was already merged into a later list
            if a and b and _width(a[0]) == _width(b[0]) and self._common(a, b) and not self._between(steps, a, b):
                b[:0] = a
                a.clear()
        return [step for step in steps if step]

    def _common(self, a: list[fx.Node], b: list[fx.Node]) -> bool:
        """Return whether both steps read the same large tensor, or whether one reads a large result of the other."""
        size = _width(a[0])
        first, second = (set().union(*(self.reads[n] for n in step), step) for step in (a, b))
        return any(_numbers(n) >= size for n in first & second)

    def _between(self, steps: list[list[fx.Node]], a: list[fx.Node], b: list[fx.Node]) -> bool:
        """Return whether another step has to run between `a` and `b`, in either order."""
        return self._path(steps, a, b) or self._path(steps, b, a)

    def _path(self, steps: list[list[fx.Node]], a: list[fx.Node], b: list[fx.Node]) -> bool:
        """Return whether `b` reads a result of `a` through at least one other step."""
        after: list[list[fx.Node]] = []
        reached = set(a)
        for _ in steps:
            readers = [s for s in steps if s and s is not a and s not in after and self._needs(s, reached)]
            if not readers:
                break
            after += readers
            reached.update(n for s in readers if s is not b for n in s)
        through = {n for s in after if s is not b for n in s}
        return self._needs(b, through)

    def _needs(self, step: list[fx.Node], computed: set[fx.Node]) -> bool:
        return any(_maker(n) in computed for node in step for n in self.reads[node])

    def _ordered(self, steps: list[list[fx.Node]]) -> list[list[fx.Node]]:
        """Sort the steps in the order of the graph, each after the steps that compute its inputs."""
        number = {node: i for i, node in enumerate(self.nodes)}
        waiting = sorted(steps, key=lambda step: min(number[n] for n in step))
        computed = {n for n in self.nodes if n.op != "call_function"}
        out: list[list[fx.Node]] = []
        while waiting:
            ready = next(s for s in waiting if all(_maker(n) in computed or n in s for x in s for n in self.reads[x]))
            waiting.remove(ready)
            out.append(ready)
            computed.update(ready)
        return [*out, [n for n in self.nodes if n.op == "output"]]

    # -- running -------------------------------------------------------------------------------------------------------
    def __call__(self, args: list[Any]) -> Any:
        inputs = (n for n in self.nodes if n.op == "placeholder")
        values: dict[fx.Node, Any] = dict(zip(inputs, args, strict=True))
        values |= {n: getattr(self.graph, n.target) for n in self.nodes if n.op == "get_attr"}
        args.clear()
        for i, step in enumerate(self.steps):
            known: dict[fx.Node, Any] = {}
            if step[0].op == "output":
                return fx.node.map_arg(step[0].args[0], lambda n: self._value(n, values, known))  # noqa: B023
            if _extern(step[0]):
                self._operator(step[0], values)
            else:
                self._kernel(step, values, i)
            for node in [n for n in values if self.last.get(n, 0) <= i]:
                del values[node]
        raise RuntimeError("the graph has no output.")

    def _operator(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        if node.target.namespace in ("aten", "prims"):
            values[node] = _empty(node)
            self.graphs.tape.launched(node.target, _tensors(node.all_input_nodes), _tensors([node]))
            return
        known: dict[fx.Node, Any] = {}
        with self.graphs.tape.paused():
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: self._value(n, values, known))
        results = node.target(*arguments[0], **arguments[1])
        values[node] = results
        if isinstance(results, (tuple, list)):  # store each tensor under its own node, to free it separately
            values.update((user, results[user.args[1]]) for user in node.users)
            del values[node]

    def _kernel(self, step: list[fx.Node], values: dict[fx.Node, Any], i: int) -> None:
        for node in step:
            over = self._over(node, step, values, i)
            if over is not None:
                del values[over]
            values[node] = _empty(node)
        read = set().union(*(self.reads[node] for node in step)).difference(step)
        self.graphs.tape.launched(None, _tensors(read), _tensors(step))

    def _value(self, node: fx.Node, values: dict[fx.Node, Any], known: dict[fx.Node, Any]) -> Any:
        """Return a node's value: a tensor in memory, or a view of one."""
        if node in values:
            return values[node]
        if node not in known:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._value(n, values, known))
            known[node] = node.target(*args, **kwargs)
        return known[node]

    def _over(self, node: fx.Node, step: list[fx.Node], values: dict[fx.Node, Any], i: int) -> fx.Node | None:
        """Return an input that the result can overwrite, or None."""
        like = lambda x: isinstance(x, Tensor) and (x.dtype, x.numel())  # noqa: E731
        result = node.meta["val"]
        for n in self.reads[node]:
            last_reader = sum(n in self.reads[other] for other in step) == 1 and self.last[n] <= i
            if (
                last_reader
                and n in values
                and n not in step
                and n.op == "call_function"
                and like(values[n]) == like(result)
            ):
                return n
        return None


def _empty(node: fx.Node) -> Tensor:
    like = node.meta["val"]
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)


def _tensors(nodes: Iterable[fx.Node]) -> list[Tensor]:
    """Return the tensors that nodes compute."""
    return [n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), Tensor)]


def _maker(node: fx.Node) -> fx.Node:
    return node.args[0] if _of_operator(node) else node


def _of_operator(node: fx.Node) -> bool:
    """Return whether a node is one of several results of an operator that Inductor calls (see `_extern`)."""
    return node.target is operator.getitem and _extern(node.args[0])


def _viewed(node: fx.Node) -> bool:
    """Return whether the result is a view of an input."""
    if not compat.is_op(node.target):
        return node.target is operator.getitem and (_extern(node.args[0]) or _viewed(node.args[0]))
    return compat.returns_view(node.target)


def _extern(node: fx.Node) -> bool:
    if node.op != "call_function" or not compat.is_op(node.target):
        return False
    if node.target.namespace not in ("aten", "prims"):
        return True
    return node.target.overloadpacket.__name__ in EXTERN


def _numbers(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 0


def _width(node: fx.Node) -> int:
    """Return the number of elements that a kernel iterates over."""
    producer = node.args[0] if node.target is operator.getitem else node
    return max([_numbers(node), *map(_numbers, producer.all_input_nodes)])


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read a value or a view of it."""
    for user in node.users:
        if user.op == "call_function" and _viewed(user):
            yield from _readers(user)
        else:
            yield user


def _inputs(node: fx.Node) -> set[fx.Node]:
    """Return the inputs of a node. An input that is a view or has one reader is replaced by its own inputs, unless it
    is an argument of the graph or the result of an operator that Inductor calls (`_extern`)."""
    values: set[fx.Node] = set()
    for n in node.all_input_nodes:
        inline = n.op == "call_function" and not _extern(n) and (_viewed(n) or len(n.users) == 1)
        values |= _inputs(n) if inline else {n}
    return values


#: for each piece, the number of leading arguments that need a gradient; it is 1 for a piece that is not listed
LEADING = {"join": 2}


class Pieces:
    """Replace a block's methods with compiled pieces. Blocks with the same stack, pattern and mixers share graphs.

    Until `trace` is called, the pieces run uncompiled and record their arguments.
    """

    def __init__(self, block: TransformerBlock, graphs: Graphs, stack: str) -> None:
        self.block, self.graphs, self.stack, self.traced = block, graphs, stack, False
        self.seen: dict[str, tuple] = {}
        if not block.memory.in_pieces:
            self.runs, self.policies = {"whole": self._whole}, {"whole": block.memory.policy}
            block.forward = partial(self._call, "whole")
            return
        self.runs = {"feed": block._feed}
        if block.memory.head_chunks == 1:
            self.runs |= {"attend": block._attend, "attend_kept": block._attend}
        else:
            self.runs |= {"norm": block._normed, "join": block._join}
        self.policies = {name: "attention-kept" if name == "attend_kept" else "none" for name in self.runs}
        block._pieces = {name: partial(self._call, name) for name in self.runs}

    def _whole(self, *args: Any, **options: Any) -> Tensor:
        """Run the block's forward with everything saved; the partitioner decides what is recomputed."""
        before, self.block._memory = self.block._memory, self.block._memory.__class__()
        try:
            return TransformerBlock.forward(self.block, *args, **options)
        finally:
            self.block._memory = before

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        if not self.traced:
            self.seen[name] = args, options
            if name == "attend":
                self.seen["attend_kept"] = args, options
            return self.runs[name](*args, **options)
        flat, spec = _flattened(args, options)
        return self._graph(name, flat, spec)(*self.parameters(), *(x for x in flat if isinstance(x, Tensor)))

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the whole block, including those that a piece does not use."""
        return list(self.block.parameters())

    def trace(self) -> None:
        """Compile the recorded calls, once with gradients and once without."""
        self.traced = True
        for name, (args, options) in self.seen.items():
            for grad in (False, True):
                flat, spec = _flattened(args, options)
                flat = [x.detach() if isinstance(x, Tensor) else x for x in flat]
                for x in flat[: LEADING.get(name, 1)]:
                    if isinstance(x, Tensor):
                        x.requires_grad_(grad)
                with torch.set_grad_enabled(grad), self.graphs.tape.paused():
                    if self._key(name, flat) not in self.graphs.compiled:
                        self._graph(name, flat, spec)(*self.parameters(), *(x for x in flat if isinstance(x, Tensor)))
        self.seen.clear()

    def _graph(self, name: str, flat: list[Any], spec: Any) -> Callable[..., Any]:
        key = self._key(name, flat)
        if key not in self.graphs.compiled:
            self.graphs.compiled[key] = self._compiled(name, flat, spec)
        return self.graphs.compiled[key]

    def _key(self, name: str, flat: list[Any]) -> tuple:
        """Return the cache key of a graph: everything that the graph depends on."""
        shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in flat)
        layer = self.block.attention
        pattern = layer.attention.pattern if name in ("whole", "attend", "attend_kept") else None
        mixers = tuple(x and x.description for x in (layer.recurrence, layer.hashed))
        return self.stack, name, self.policies[name], pattern, mixers, shapes, torch.is_grad_enabled()

    def _compiled(self, name: str, flat: list[Any], spec: Any) -> Callable[..., Any]:
        names, run = [n for n, _ in self.block.named_parameters()], self.runs[name]

        def call(*tensors: Tensor) -> Any:
            values = iter(tensors[len(names) :])
            args, options = _together([next(values) if isinstance(x, Tensor) else x for x in flat], spec)
            with compat.with_parameters(self.block, dict(zip(names, tensors, strict=False))):
                return run(*args, **options)

        make = lambda graph, inputs: Kernels(graph, self.graphs)  # noqa: E731
        cut = partial(_partition, policy=self.policies[name], parameters=len(names))
        return compat.ahead_of_time(call, make, cut, len(names))


class _Table(NamedTuple):
    """A rotary table as a pytree."""

    cos: Tensor
    sin: Tensor
    scale: Tensor | None


def _flattened(args: Any, options: Any) -> tuple[list[Any], Any]:
    plain = lambda x: _Table(x.cos, x.sin, x.scale) if isinstance(x, RotaryTable) else x  # noqa: E731
    return compat.flatten(compat.map_tree(plain, (args, options), RotaryTable))


def _together(flat: list[Any], spec: Any) -> tuple[Any, Any]:
    back = lambda x: RotaryTable(*x) if isinstance(x, _Table) else x  # noqa: E731
    return compat.map_tree(back, compat.unflatten(flat, spec), _Table)


def _partition(joint: fx.GraphModule, inputs: Any, *, policy: str, parameters: int, **options: Any) -> Any:
    """Partition a joint graph into (forward, backward)."""
    backward = {node for node in joint.graph.nodes if node.op == "placeholder" and "tangents" in node.name}
    for node in joint.graph.nodes:
        if backward.intersection(node.all_input_nodes):
            backward.add(node)
        elif node.op == "call_function" and policy != "none":
            node.meta["recompute"] = _tag(node, policy)
            node.meta["ac_graph_id"] = 1
    options["static_lifetime_input_indices"] = list(range(parameters))
    return compat.min_cut(joint, inputs, **options)


def _tag(node: fx.Node, policy: str) -> CheckpointPolicy:
    producer = node.args[0] if node.target is operator.getitem else node
    if policy != "attention-kept":
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if producer.target in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
