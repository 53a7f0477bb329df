"""Resolves a call on several ranks: they compare the call, then each resolves its part of the work and the exchange.

Shape letters: B batch, N tokens of the sequence, L tokens of this rank, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_dilated.attention.backends import Request, choose, triton_up_to
from lightning_dilated.attention.context import RANKS, Context, OpCall
from lightning_dilated.attention.executors import HeadWindow
from lightning_dilated.attention.executors.remote import AllToAll, HeadParallel, RowExchange
from lightning_dilated.attention.resolve import (
    Resolved,
    find_documents,
    has_varying_length,
    head_window,
    local_executor,
    local_pairs,
    local_spans,
    whole_pairs,
)
from lightning_dilated.attention.spans import Span, spans
from lightning_dilated.attention.spec import CallSpec, decode
from lightning_dilated.sequence.consensus import Agreement, Facts
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.all_to_all import CompiledSwitch, HeadGroup, compile_switch, windows
from lightning_dilated.sequence.exchange.run import Compiled, compile_program
from lightning_dilated.sequence.exchange.transport import Planned, Traffic, Wire
from lightning_dilated.sequence.group import SequenceGroup, find_sequence
from lightning_dilated.sequence.head_size import in_groups, plan_in_groups
from lightning_dilated.sequence.planner import Plan, joint_pairs, plan
from lightning_dilated.sequence.requirements import Document, Problem, straddling


class Ranks(Context):
    """The context of all calls with a `SequenceGroup` in their `CallSpec`. It adds rows of other ranks."""

    def resolve(self, call: OpCall) -> tuple[Resolved, int]:
        """Return the `Resolved` of a call on this rank, and the dropout seed that all ranks use."""
        group = find_sequence(call.spec.sequence)
        call_id = None if call.number is None else f"backward of call {int(call.number)}"
        agreed, engine = compare(group, call, call_id)
        key = *call.key, engine, agreed.lengths
        make = functools.partial(_shared, call.spec, group, call.documents, agreed.lengths, call.q, call.k)
        resolved = group.remember(key, make)
        record_planned(group, resolved.planned, call.backward)
        group.plan = resolved.plan
        return replace(resolved, number=agreed.number), agreed.seed

    def pairs(
        self, spec: CallSpec, q: Tensor, k: Tensor, documents: tuple[Tensor | None, Tensor | None], place: Tensor | None
    ) -> int:
        """Return the number of pairs of this rank's queries; see `op.attention_pairs`."""
        group = find_sequence(spec.sequence)
        if group.agreed is None:
            return whole_pairs(spec, q, k, documents)
        seq_len, window = group.agreed.seq_len, head_window(spec, q.shape[2], k.shape[2])
        sizes = {"head_dim": q.shape[3], "element_size": q.element_size()}
        chosen, local = share(group, spec, window, spans(len(q), seq_len, *documents), seq_len, sizes)
        joint = joint_pairs(chosen.problem, group.rank // chosen.head_size)
        return local_pairs(window._replace(heads=chosen.problem.heads), spec.causal, local) + joint


def compare(group: SequenceGroup, call: OpCall, call_id: str | None, chunk: int | None = None) -> tuple[Agreement, str]:
    """Return the ranks' agreement on a call, and the name of an engine for it. `chunk`: tokens of a stream's chunk."""
    facts, engine = group.guard(_facts, *call.key, call.backward)
    later = call.spec.needs_grad or chunk is not None
    return group.agree(facts, call.q.shape[1], call.seed, call_id, later=later, chunk=chunk), engine


def record_planned(group: SequenceGroup | None, planned: tuple[Planned, Planned] | None, backward: bool) -> None:
    """Record a planned exchange if the group has a log."""
    if group is not None and planned is not None and group.forward_traffic.log is not None:
        group.forward_traffic.log.planned.append(planned[backward])


@functools.lru_cache(maxsize=256)
def _facts(
    code: str, shape: torch.Size, kv_heads: int, dtype: torch.dtype, device: torch.device,
    lengths: tuple[int, ...] | None, bounds: bytes | None, _: tuple, backward: bool,
) -> tuple[Facts, str]:  # fmt: skip
    """Return the facts of a call that must be the same on all ranks, and the name of an engine that serves the call.

    The arguments before `backward` are `OpCall.key`. The engine itself is chosen later, when block sizes are known.
    """
    spec = decode(code)
    engine = choose(spec.engine, Request(device, dtype, shape[3], spec.dropout > 0, spec.scale), log=False).engine.name
    digest = None if bounds is None else hashlib.blake2b(bounds, digest_size=8).hexdigest()
    facts = {
        "pass": "backward" if backward else "forward",
        "requires grad": spec.needs_grad,
        "pattern": spec.pattern.code,
        "batch": shape[0],
        "heads": shape[2],
        "kv heads": kv_heads,
        "window of heads": spec.window,
        "head dim": shape[3],
        "dtype": dtype,
        "causal": spec.causal,
        "scale": spec.scale,
        "dropout": spec.dropout,
        "lengths": None if lengths is None else list(lengths),
        "cu_seqlens (number, digest)": None if bounds is None else (len(bounds) // 4, digest),
    }
    return Facts(facts), engine


def _shared(
    spec: CallSpec, group: SequenceGroup, documents: tuple[Tensor | None, Tensor | None], lengths: tuple[int, ...],
    q: Tensor, k: Tensor,
) -> Resolved:  # fmt: skip
    """Resolve a call for one rank: its local blocks and its part of the exchange. `lengths`: tokens of each rank."""
    batch, _, heads, head_dim = q.shape
    window = head_window(spec, heads, k.shape[2])
    all_documents = find_documents(batch, sum(lengths), *documents, spec)
    sizes = {"head_dim": head_dim, "element_size": q.element_size()}
    chosen, parts = share(group, spec, window, all_documents, sum(lengths), sizes)
    problem, head_size = chosen.problem, chosen.head_size
    ring, member = divmod(group.rank, head_size)
    members = range(ring * head_size, (ring + 1) * head_size)
    per_node = max(1, group.ranks_per_node // head_size)
    route = None
    if name := chosen.exchange:
        routed = problem, ring, name, per_node, q.device
        route = group.remember(routed, functools.partial(_compile, *routed))
    whole = isinstance(route, CompiledSwitch)
    changing = has_varying_length(all_documents, sum(lengths))
    request = replace(Request.of(q, spec.dropout, spec.scale), changing=changing)
    shape = batch, sum(lengths[m] for m in members), problem.heads[1] - problem.heads[0], head_dim
    window = window._replace(heads=problem.heads, whole=whole)
    batches = route.batches if isinstance(route, CompiledSwitch) else []
    owned = [sum(x.pairs for x in segments.requests) for segments in batches]
    call, executor = local_executor(spec, request, window, parts, shape, triton_up_to(spec.engine, request), owned)
    traffic = group.forward_traffic, group.backward_traffic
    planned = None
    if name and route is not None:
        ranks = tuple(range(member, group.ranks, head_size))
        wires = for_passes(lambda x: Wire(group.group, ranks, ring, x), traffic)
        executor = (AllToAll if whole else RowExchange)(call, executor, route, wires)
        planned = for_passes(lambda x: Planned(x.run, problem, name, ring, per_node, **sizes), traffic)
    if head_size > 1:
        cuts = windows(heads, k.shape[2], head_size)
        kv_cuts = [(a // problem.group, -(-b // problem.group)) for a, b in cuts]
        tokens = tuple(lengths[m] for m in members)
        groups = for_passes(lambda x: HeadGroup(Wire(group.group, tuple(members), member, x), tokens), traffic)
        executor = HeadParallel(call, executor, groups, cuts, kv_cuts)
    return Resolved(executor, chosen, planned)


def for_passes(make: Callable[[Traffic], Any], traffic: tuple[Traffic, Traffic]) -> tuple[Any, Any]:
    """Return the objects that `make` returns for the traffic of the forward and of the backward."""
    return make(traffic[0]), make(traffic[1])


def share(
    group: SequenceGroup, spec: CallSpec, window: HeadWindow, documents: Sequence[Span], seq_len: int,
    sizes: Mapping[str, int],
) -> tuple[Plan, tuple[Span, ...]]:  # fmt: skip
    """Return this rank's plan, and the parts of documents on this rank. `sizes`: head_dim and element_size."""
    pieces = [Document(s.batch, s.batches, s.start, s.start + s.length) for s in documents]
    shard = group.shard(seq_len)
    problem = Problem(*window[:3], spec.causal, shard, straddling(pieces, shard), window.heads)
    options: dict[str, Any] = {"ranks_per_node": group.ranks_per_node, "links": group.links, **sizes}
    options["exchange_memory"] = group.exchange_memory
    if group.head_size == "auto" and group.layout != "chunked":
        chosen = plan_in_groups(problem, group.rank, group.exchange, **options)
    else:
        size = group.head_size if isinstance(group.head_size, int) else 1
        chosen = plan(in_groups(problem, size, group.rank % size), group.exchange, **options)
    return chosen, local_spans(pieces, chosen.problem.shard.ranges(group.rank // chosen.head_size))


def _compile(
    problem: Problem, rank: int, exchange: str, per_node: int, device: torch.device
) -> Compiled | CompiledSwitch:
    program: Any = EXCHANGES[exchange].program(problem, rank, per_node)
    make = compile_switch if exchange == "switch" else compile_program
    return make(problem, rank, program, device)


#: keeps the context alive: `find_context` finds it only as long as the object exists
_RANKS = Ranks(RANKS)
