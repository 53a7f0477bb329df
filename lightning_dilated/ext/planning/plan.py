"""Implement `lightning-dilated plan`: memory, time, traffic and the longest sequence of a run, before it is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_dilated._removed import removed
from lightning_dilated.ext.explain.advice import advice
from lightning_dilated.ext.planning.candidates import (
    candidates_of,
    in_words,
    recommended,
    streams,
    whole_recipe,
    yaml_lines,
)
from lightning_dilated.ext.planning.counting.footprint import Exchanged
from lightning_dilated.ext.planning.counting.memory_tracker import KINDS
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.counting.workspace import OpCall
from lightning_dilated.ext.planning.estimate import Case, Facts, Time, measured_machine
from lightning_dilated.ext.planning.machine import measured_rules
from lightning_dilated.ext.planning.memory import GIB, Bar, Memory, bytes_moved_at_fit_end, memory_plot
from lightning_dilated.ext.planning.plan_request import Request, parser, resolve_request
from lightning_dilated.ext.planning.streams import in_chunks
from lightning_dilated.ext.streams.carried_rows import chunk_count
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern.rows import cycle_to
from lightning_dilated.sequence.head_size import plan_in_groups
from lightning_dilated.sequence.planner import make_problem

#: propose a different layout if the busiest rank computes longer than the average rank by this share of a step
UNEVEN = 0.1
#: page that lists which numbers are measured, scaled or assumed
RESTS_ON = 'docs/planning.md, "The assumptions of a plan"'


def run(argv: list[str]) -> None:
    """Run the command: parse options, print the plan, and plot it if `--plot` is given."""
    if {"--find-max", "--find_max"} & set(argv):
        raise ValueError(removed("plan --find-max"))
    args = parser().parse_args(argv)
    plan = report(resolve_request(args))
    print("\n".join(plan.lines))
    if args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        memory_plot(plan.bars, plan.limit, args.plot, plan.title, plan.caption)
        print(f"\nplot: {args.plot}")


def layout_hint(request: Request, case: Case, row: Row | None) -> str | None:
    """Return a note on the layout if GPUs share chunks of a stream or the zigzag layout is faster, otherwise None."""
    time = None if row is None else row.time
    if request.layout == "chunked" or (time is not None and time.exchange is not None):
        return (
            "the GPUs share every chunk of a stream: RingDilatedStrategy(layout='chunked'). With sequence_size=1 each "
            "GPU streams different sequences; --gpus 1 plans that."
        )
    if row is None or time is None or time.step.uneven < UNEVEN * time.seconds or case.setup.layout != "contiguous":
        return None
    other = replace(case, setup=replace(case.setup, layout="zigzag")).time(row.settings, row.tokens)
    if other.seconds > (1 - UNEVEN) * time.seconds:
        return None
    return (
        f"the last rank sees most keys and computes {time.step.uneven:.3g} s a step longer than the average rank: with "
        "RingDilatedStrategy(layout='zigzag') every rank has an early and a late part, and a step takes "
        f"{other.seconds:.3g} s in place of {time.seconds:.3g} s."
    )


def recurrence_notes(case: Case) -> list[str]:
    """List notes on the time of recurrences, and on their uncounted memory."""
    layers = [x for x in cycle_to(case.facts.recurrences or (None,), case.facts.depth) if x is not None]
    if not layers:
        return []
    notes = ["recurrence: states between chunks of a stream are not counted."]
    if any(x.unmeasured is None for x in layers):
        times = measured_rules()
        notes.append(f"recurrence: rule as measured on {times.name} ({times.heads} heads of {times.head_dim}, bf16).")
    for reason in dict.fromkeys(x.unmeasured for x in layers if x.unmeasured):
        each = 3 * sum(x.flops for x in layers if x.unmeasured == reason)
        notes.append(f"recurrence: a rule, {each:.3g} FLOPs a token of a step, has no time here: {reason}.")
    if case.setup.ranks > 1:
        heads = case.subject.call.kv_heads, case.subject.call.head_dim
        size = 3 * sum(x.description.exchanged_bytes(case.setup.ranks, *heads) for x in layers)
        notes.append(
            f"recurrence: a rank receives up to {size / 2**20:.3g} MiB of maps of its state in a step; the time of these "
            "maps is not counted."
        )
    return notes


def hashed_note(case: Case) -> str | None:
    """Return a note on hashed heads and on what is not counted for them; None if no layer has them."""
    layers = {i: x for i, x in enumerate(case.facts.hashed) if x is not None}
    if not layers:
        return None
    first, *_ = layers.values()
    where = "all layers" if len(layers) == case.facts.depth else f"layer(s) {', '.join(map(str, layers))}"
    return (
        f"hashed heads: {where}, {in_numbers(len(layers) * first.parameters)} parameters, "
        f"{3 * len(layers) * first.lookups:.3g} FLOPs of lookups a token of a step. "
        f"Sequences of up to soft_until={first.description.soft_until} tokens are counted as longer ones. "
        "In streams, all codes are assumed to be equally frequent. The memory of rows that ranks exchange is not counted."
    )


def notes_on(request: Request, case: Case, row: Row | None = None) -> list[str]:
    """List notes on what this plan includes and leaves out; `row` is the recommended setting."""
    base, setup, size = measured_machine(), case.setup, request.shared_by
    measured = request.gpu.name == "H200" and (case.facts.dim, case.facts.depth) == (base.dim, base.depth)
    notes: list[str | None] = [
        f"time: {'measured parts' if measured else 'scaled, an estimate,'} of {base.name} ({base.dim} x {base.depth}, "
        f"compiled). The basis of all numbers: {RESTS_ON}.",
        *request.model.planning_notes(),
        *recurrence_notes(case),
        hashed_note(case),
    ]
    if setup.ranks > 1:
        sums = "" if setup.bucket_cap_mb is None else f" Gradients are summed {setup.bucket_cap_mb} MiB at a time."
        notes.append(f"all {setup.ranks:,} GPUs share every sequence; links: {setup.links}.{sums}")
        notes += [layout_hint(request, case, row), head_size_note(request)]
    if request.tokens and (hints := advice(request.model, request.tokens)):
        notes.append(f"what the pattern cannot do, whatever the GPUs: {hints}")
    if size is not None:
        notes.append(
            f"the recipe's sequence_size puts a sequence on {size} of the {setup.ranks:,} GPUs, which train "
            f"{setup.ranks // size} at a time; this plan puts one on all of them. --gpus {size} plans the recipe's sequence."
        )
    if request.outer:
        notes.append(
            "these numbers leave out the recipe's outer steps: shared parameters and momentum take 8 bytes a trained "
            "parameter more (of the host with offload: true), and up to 12 of the GPU while a parameter is sent."
        )
    if request.batch > 1:
        notes.append(
            f"this plan is for one sequence, but the recipe's batches have {request.batch} on each data rank. For "
            f"their memory multiply --tokens by {request.batch}, or set data.init_args.batch_size: 1."
        )
    if request.streams:
        notes.append(
            f"the recipe's data are {request.streams} streams; this plan is for one step of one stream. For a data rank's "
            "memory multiply --tokens by its number of streams; states carried from step to step are not counted."
        )
    return [note for note in notes if note]


@dataclass(frozen=True)
class Report:
    """Lines to print, and bars to draw."""

    lines: list[str]
    bars: list[Bar]
    limit: int
    title: str
    caption: str


@dataclass(frozen=True)
class Row:
    """A planned setting: its longest sequence, and its memory and time at the requested or the longest length."""

    settings: MemorySettings
    longest: int
    tokens: int
    memory: Memory | None
    time: Time | None
    fits: bool


def report(request: Request) -> Report:
    """Plan a run.

    Raises:
        ValueError: if the planner does not support the model, or if the exchange cannot run the model's pattern.
    """
    subject = counted_model_of(request.model, request.precision, None, request.compile_blocks, request.gpu.capability)
    facts = Facts.of(request.model, subject)
    case = Case(subject, facts, request.setup(strategy_of(request, facts)), request.gpu, request.host)
    settings = [request.settings] if request.settings else candidates_of(facts, case.room)
    if request.settings is None and request.stream is not None:
        settings = [replace(x, stream=request.stream) for x in settings]
    _check_stream(request, case.setup.strategy, settings)
    rows = [row_of(case, x, request.tokens) for x in settings]
    best = recommended(case, settings, request.tokens)
    sharded, can_stream = case.setup.strategy == "ring_dilated_fsdp", getattr(request.model, "streams", False)
    if best is None and request.settings is None and request.stream is None and can_stream and not sharded:
        settings = [*settings, *streams(settings, request.ranks)]
        rows += [row_of(case, x, request.tokens) for x in settings[len(rows) :]]
        best = recommended(case, settings, request.tokens)
    chosen = next((row for row in rows if row.settings == best), None)
    lines = [*_head(request, case), "", *_table(rows, best, request.tokens)]
    if chosen is not None and chosen.memory is not None:
        lines += [
            "",
            *_details(case, chosen),
            *_head_sizes(request, case, chosen.tokens),
            "",
            *_recipe(request, case, chosen),
        ]
    else:
        lines += ["", _nothing(case, rows, request)]
    lines += ["", *(f"  - {note}" for note in notes_on(request, case, chosen))]
    title = f"{request.tokens:,} tokens" if request.tokens else "each at its longest sequence"
    bars = [Bar(in_words(r.settings), r.memory.kinds if r.memory else None, r.longest) for r in rows]
    caption = "; ".join([*_head(request, case)[::2], "counted under fake tensors; red: what may be planned with."])
    return Report(lines, bars, request.gpu.usable(request.ranks), f"memory of a rank, {title}", caption)


def _check_stream(request: Request, strategy: str, settings: Sequence[MemorySettings]) -> None:
    """Raise ValueError if `settings` have chunks and the model or the strategy cannot run them."""
    sizes, name = [x.stream for x in settings if x.stream is not None], type(request.model).__name__
    if sizes and not getattr(request.model, "streams", False):
        raise ValueError(f"--stream {sizes[0]}: {name} cannot be computed chunk by chunk. Leave it out.")
    if sizes and strategy == "ring_dilated_fsdp":
        raise ValueError(
            f"--stream {sizes[0]} is not offered with {strategy}, which would gather all weights for every chunk. Take "
            "--strategy ring_dilated, where each GPU has all weights, or leave --stream out."
        )


def strategy_of(request: Request, facts: Facts) -> str:
    """Return the requested strategy; default: FSDP if parameters, gradients and states fill half a GPU, else DDP."""
    if request.strategy is not None:
        return request.strategy
    each = 20 if request.precision.endswith("mixed") or request.precision == "32-true" else 10
    return "ring_dilated_fsdp" if facts.parameters * each > request.gpu.memory / 2 else "ring_dilated"


def row_of(case: Case, settings: MemorySettings, tokens: int | None) -> Row:
    longest = case.longest(settings)
    at = tokens or longest
    if not at:
        return Row(settings, 0, 0, None, None, False)
    return Row(settings, longest, at, case.memory(settings, at), case.time(settings, at), case.fits(settings, at))


def _head(request: Request, case: Case) -> list[str]:
    facts, setup, call = case.facts, case.setup, case.subject.call
    kv = "" if call.kv_heads == call.heads else f" ({call.kv_heads} kv)"
    many = f"{setup.ranks:,} x {request.gpu.name}"
    nodes = f", {setup.ranks // setup.per_node:,} nodes" if setup.ranks > setup.per_node else ""
    offload = " with cpu_offload" if setup.cpu_offload else ""
    zigzag = ", zigzag" if setup.layout == "zigzag" and setup.ranks > 1 else ""
    trained = "" if facts.whole else f" ({in_numbers(facts.trained_parameters)} trained)"
    x = facts.decoder
    decoder = f"; decoder: {x.depth} x {x.dim}, heads of {x.call.head_dim}" if x else ""
    meaning = f"; a token is {request.model.token_meaning}" if request.model.token_meaning else ""
    return [
        f"model: {type(request.model).__name__}, {in_numbers(facts.parameters)} parameters{trained}, "
        f"{facts.depth} blocks of {facts.dim}, {call.heads} heads{kv} of {call.head_dim}, {request.precision}, blocks "
        f"{'compiled' if case.subject.compile_blocks else 'not compiled'}{decoder}",
        f"pattern: {_patterns(call, facts.depth)}, {'causal' if call.causal else 'both directions'}{meaning}",
        f"machine: {many}{nodes}, {setup.strategy}{zigzag}{offload}, {setup.optimizer}; "
        f"{request.gpu.usable(setup.ranks) / GIB:.1f} GiB of {request.gpu.memory / GIB:.1f} are planned with",
    ]


def in_numbers(n: int) -> str:
    """Format a number as 85M, 7.9B or 1T."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return str(n)


def _table(rows: list[Row], best: MemorySettings | None, tokens: int | None) -> list[str]:
    at = f"at {tokens:,} tokens" if tokens else "at the longest"
    wide = max(46, *(len(in_words(row.settings)) + 1 for row in rows))
    head = f"  {'setting':<{wide}}{'longest N':>15}{'GiB':>9}{'host':>7}{'step s':>9}{'tokens/s':>12}{'waits':>7}{'MFU':>6}"
    lines = [f"{'':<{wide + 17}}   {at}", head]
    for row in rows:
        mark = "* " if row.settings == best else "  "
        name = f"{mark}{in_words(row.settings):<{wide}}{row.longest:>15,}"
        if row.memory is None or row.time is None:
            lines.append(f"{name}   nothing fits")
            continue
        memory, time = row.memory, row.time
        over = "" if row.fits else " !"
        lines.append(
            f"{name}{memory.peak / GIB:>9.1f}{(memory.host + memory.states) / GIB:>7.1f}{time.seconds:>9.3g}"
            f"{row.tokens / time.seconds:>12,.0f}{time.exposed / time.seconds:>7.1%}{time.mfu:>6.0%}{over}"
        )
    if any(row.memory and not row.fits for row in rows):
        lines.append("  !: does not fit")
    return [*lines, "  *: recommended" if best is not None else "  no setting fits"]


def _details(case: Case, row: Row) -> list[str]:
    """List the recommended setting's memory and time by kind, and its exchange."""
    memory, time = row.memory, row.time
    parts = " ".join(f"layer {x + 1}" if isinstance(x, int) else x for x in memory.moment)
    lines = [f"{in_words(row.settings)}, {row.tokens:,} tokens, {-(-row.tokens // case.setup.ranks):,} a rank", ""]
    lines += [f"  {kind:<22}{memory.kinds[kind] / GIB:>9.2f} GiB" for kind in KINDS if kind in memory.kinds]
    lines += [f"  {'peak':<22}{memory.peak / GIB:>9.2f} GiB, in: {parts}"]
    if memory.carried:
        lines += [f"  {'of it carried rows':<22}{memory.carried / GIB:>9.2f} GiB"]
    if memory.host:
        lines += [f"  {'pinned host memory':<22}{memory.host / GIB:>9.2f} GiB a rank"]
    if memory.states:
        lines += [f"  {'states on the host':<22}{memory.states / GIB:>9.2f} GiB a rank, with parameters and gradients"]
    else:
        end = bytes_moved_at_fit_end(case.footprint(row.settings), case.setup)
        over = ", MORE THAN IT HAS" if 0 < case.host * GIB < end else ""
        lines += [
            f"  {'as fit ends':<22}{end / GIB:>9.2f} GiB of the host a rank{over}: Lightning moves model and states there"
        ]
    if in_chunks(row.settings, row.tokens):
        lines.append(f"  {chunk_count(row.tokens, row.settings.stream or 1)} chunks; one, forward and backward:")
    for kind in (
        "attention", "recurrence", "hashed heads", "rest", "edge", "optimizer", "arrivals", "few rows", "tokens for heads"
    ):  # fmt: skip
        if kind == "optimizer" and case.setup.cpu_offload:
            lines.append(f"  {'optimizer, on the host':<22}{time.optimizer * 1e3:>9.1f} ms")
        elif time.step.compute.get(kind):
            lines.append(f"  {kind:<22}{time.step.compute[kind] * 1e3:>9.1f} ms")
    named = sum(time.step.compute.values()) + time.exposed
    named -= time.step.compute.get("optimizer", 0.0) if case.setup.cpu_offload else 0.0
    if time.seconds - named > 5e-5 and not in_chunks(row.settings, row.tokens):
        lines.append(f"  {'groups, tiles, windows':<22}{(time.seconds - named) * 1e3:>9.1f} ms")
    lines.append(f"  {'step':<22}{time.seconds * 1e3:>9.1f} ms, of which {time.exposed * 1e3:.1f} ms wait")
    return [*lines, *_exchange(case, memory, time)]


def _exchange(case: Case, memory: Memory, time: Time) -> list[str]:
    if case.setup.ranks == 1:
        return []
    if time.exchange is not None:
        x = time.exchange
        parts = ("rows, all forwards", x.forward), ("backward", x.backward), ("of both, earlier rows", x.carried)
        lines = ["", f"  exchange gather, a rank on the mean, of all {case.facts.depth} layers and all chunks:"]
        return [*lines, *(f"  {name:<22}{size / 1e6:>11,.1f} MB" for name, size in parts)]
    crossing = [(layer, rows) for layer, rows in _layers(memory.exchange, case.facts.depth) if rows.name is not None]
    if not crossing:
        return ["", "  no segment crosses a shard: nothing is exchanged"]
    layers = sum(stack.depth for stack in case.facts.stacks)
    names = " and ".join(dict.fromkeys(rows.name for _, rows in crossing))
    lines = ["", f"  exchange {names}, a rank on the mean, of all {layers} layers (from other nodes):"]
    for run, name in (("forward", "rows, forward"), ("again", "rows, recomputed"), ("backward", "backward"),
                      ("gradients", "parameter gradients")):  # fmt: skip
        intra, inter = time.step.bytes(run)
        if intra + inter:
            seconds = intra / case.setup.links.near + inter / case.setup.links.far
            mb = f"{(intra + inter) / 1e6:>11,.1f} MB ({inter / 1e6:,.1f} MB)"
            lines.append(f"  {name:<22}{mb}, {seconds * 1e3:,.2f} ms of the links")
    return lines + [line for layer, rows in crossing for line in _prices(layer, rows)]


def _head_sizes(request: Request, case: Case, tokens: int) -> list[str]:
    """List the choices of `head_size="auto"` for the layers' patterns."""
    setup, call = case.setup, case.subject.call
    if request.head_size != "auto" or setup.ranks == 1 or request.layout == "chunked":
        return []
    lines = []
    for one, layers in call.layers(case.facts.depth):
        heads = one.heads, one.kv_heads
        problem = make_problem(
            one.pattern, tokens, *heads, ranks=setup.ranks, layout=request.layout, causal=call.causal
        )
        sizes = {"head_dim": one.head_dim, "element_size": one.dtype.itemsize}
        plan = plan_in_groups(
            problem, 0, setup.exchange, ranks_per_node=setup.per_node, links=setup.links,
            exchange_memory=setup.exchange_memory, **sizes,
        )  # fmt: skip
        lines += ["", f"  of {layers} layers' calls:", *(f"    {x}" for x in plan.head_lines())]
    return lines


def head_size_note(request: Request) -> str | None:
    """Return a note on what the plan leaves out with head-parallel groups."""
    if request.head_size == 1 or (request.head_size == "auto" and request.layout == "chunked"):
        return None
    return (
        f"with head_size={request.head_size} ranks also trade tokens for heads: the plan includes the time of the "
        "trade, but not the memory of its buffers."
    )


def _patterns(call: OpCall, depth: int) -> str:
    """Return the pattern that all layers share, or each pattern with its number of layers."""
    calls = call.layers(depth)
    return "; ".join(f"{layers} layers of {x.pattern}" for x, layers in calls) if len(calls) > 1 else str(call.pattern)


def _layers(x: Exchanged, depth: int) -> list[tuple[str, Exchanged]]:
    """List (label of layers, exchange of these layers), one entry for each distinct exchange."""
    if not x.others:
        return [("a layer's", x)]
    numbers: dict[Exchanged, list[int]] = {}
    for layer, one in enumerate(cycle_to(x.cycle, depth)):
        numbers.setdefault(replace(one, others=()), []).append(layer)
    first_three = lambda layers: ", ".join(map(str, layers[:3])) + (", ..." if len(layers) > 3 else "")  # noqa: E731
    return [(f"of layers {first_three(layers)}", one) for one, layers in numbers.items()]


def _prices(layer: str, x: Exchanged) -> list[str]:
    """List the estimated costs of all exchanges for a layer's call."""
    if x.plan is None or not x.plan.prices:
        return []
    return [f"  {layer}, on the priced rank with most:", *(f"    {y}" for y in str(x.plan).splitlines())]


def _recipe(request: Request, case: Case, row: Row) -> list[str]:
    """Return the whole recipe of the planned run, or only the changed settings if no recipe can express the model."""
    if request.recipe is None:
        lines = yaml_lines(row.settings, case.setup, request.residual)
        return ["in the recipe:", "", *(f"  {line}" for line in lines)]
    recipe, memory = request.recipe, request.exchange_memory
    init_args = (recipe.get("data") or {}).get("init_args") or {}
    if "seq_len" in init_args and init_args["seq_len"] is None:  # neither an option nor the recipe sets a length
        recipe = {**recipe, "data": {**recipe["data"], "init_args": {**init_args, "seq_len": row.tokens}}}
    options = {"exchange": request.exchange, "head_size": request.head_size}
    options |= {"exchange_memory_gib": None if memory is None else memory / GIB}
    lines = whole_recipe(recipe, row.settings, case.setup, options, request.residual)
    head = "in the recipe, which can be saved and run by `lightning-dilated fit --config FILE`:"
    return [head, "", *(f"  {line}" for line in lines)]


def _nothing(case: Case, rows: list[Row], request: Request) -> str:
    """Describe what to change if no setting fits."""
    tokens = request.tokens
    narrow = "--residual_dtype bfloat16, " if "residual_dtype" in request.model.hparams else ""
    best = max(rows, key=lambda row: row.longest)
    if not best.longest:
        states = best.memory.states if best.memory else 0
        if case.host and states > case.host * GIB:
            return (
                f"Parameters, gradients and states take {states / GIB:.1f} GiB of the host on each rank, which has "
                f"{case.host:.1f} of --host_memory. More GPUs, more host memory, or --no-cpu_offload."
            )
        sharded = case.setup.strategy == "ring_dilated_fsdp"
        option = "--cpu_offload" if sharded else "--strategy ring_dilated_fsdp"
        hint = "" if case.setup.cpu_offload else f" Take {option}."
        return (
            f"Parameters, gradients and states alone do not fit.{hint} More GPUs, or --optimizer adamw8bit, make room."
        )
    need = -(-(tokens or 0) * case.setup.ranks // best.longest)
    # shorter chunks take less memory, but carry more rows to the next chunk
    another = "" if request.stream is None else "another --stream (without --stream and --policy, plan proposes one), "
    return (
        f"{tokens:,} tokens do not fit: the longest is {best.longest:,} with {in_words(best.settings)}. Take {another}about "
        f"{need:,} GPUs, {narrow}or --host_memory to offload to."
    )
