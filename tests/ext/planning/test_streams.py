"""Plans of streams: carried rows equal real rows, memory does not grow with the length, and the command line."""

import pytest

import lightning_dilated as ld
from lightning_dilated.ext.planning.candidates import in_words, recommended, streams
from lightning_dilated.ext.planning.counting.model_specs import Facts, counted_model_of
from lightning_dilated.ext.planning.estimate import Case
from lightning_dilated.ext.planning.gpus import find_gpu
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.ext.planning.streams import carried_rows
from lightning_dilated.ext.streams.carried_rows import CarryPlan, chunk_problem
from lightning_dilated.ext.streams.shard import ChunkShard
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.sequence.requirements import Document

from ...attention.peak import printed

GEOMETRIC = ld.DilatedPattern.geometric(16, 4096)
PATTERNS = {
    "geometric": GEOMETRIC,
    "shifted": GEOMETRIC.shifted(),
    "hybrid": ld.DilatedPattern.hybrid(4, 4, local=32)[3],
    "head groups": ld.DilatedPattern.head_groups([64, 1024], [1, 4], 4),
    "walls": ld.DilatedPattern.dense(64),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(("tokens", "chunk"), [(4096, 256), (4000, 192)])
def test_one_head_stands_for_those_like_it(name, tokens, chunk):
    """Rows counted for one head equal the plan of all heads, except near segment ends."""
    problem = chunk_problem(PATTERNS[name], 4, 4, [Document(0, 1, 0, tokens)], ChunkShard(0, tokens, chunk), (0, 4))
    plan = CarryPlan(problem)
    stored, live = carried_rows(PATTERNS[name], 4, 4, tokens, chunk)
    assert stored == pytest.approx(plan.stored(), rel=0.02, abs=8)
    assert live == pytest.approx(max(sum(x.count for x in plan.live(i)) for i in range(plan.chunks)), rel=0.02, abs=8)


PEAKS = """
import lightning_dilated as ld
from lightning_dilated.memory.settings import MemorySettings

def step(model, tokens):
    text = torch.randint(0, 16, (1, tokens))
    batch = {"tokens": text, "labels": text.roll(-1, 1)}
    def run():
        total, count = model.loss_terms(batch)
        (total / count).backward()
        model.zero_grad()
    return run

torch.manual_seed(0)
model = ld.LongNetLM(PATTERN, 16, 128, 2, 4, max_seq_len=65536)
model.configure_model()
model.transformer.memory = MemorySettings("block", stream=4096)
step(model, 9000)()
for tokens in (16384, 32768, 65536):
    print(peak(step(model, tokens))[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DilatedPattern.dense(1024)", "DilatedPattern.geometric(1024, 65536)"])
def test_peak_is_flat_in_the_length(name):
    """Without the memory of carried rows (stored, in use, fp32 gradients), the peak is constant to 2 %."""
    peaks = printed(PEAKS.replace("PATTERN", name))
    pattern = eval(name, {"DilatedPattern": ld.DilatedPattern})
    rows = [carried_rows(pattern, 4, 4, n, 4096) for n in (16384, 32768, 65536)]
    less = [x - 2 * (stored + 2 * live) * 2 * 32 * 4 for x, (stored, live) in zip(peaks, rows, strict=True)]
    assert max(less) <= 1.02 * min(less), (peaks, less)
    assert (rows[-1][0] > 0) == ("geometric" in name)


def plan_of(**options):
    model = ld.LongNetLM(GEOMETRIC, dim=64, depth=4, num_heads=4, **options)
    gpu = find_gpu("H200")
    subject = counted_model_of(model, "bf16-mixed", None, True, gpu.capability)
    return Case(subject, Facts.of(model, subject), Setup(), gpu)


def test_memory_and_time_of_a_case():
    """Memory covers a chunk and carried rows. Time is proportional to the length. Truncation saves a forward."""
    case, settings = plan_of(), MemorySettings("block", stream=8192)
    whole = case.memory(MemorySettings("block"), 8192)
    assert case.memory(settings, 8192) == whole
    rows = case.memory(settings, 16384), case.memory(settings, 1 << 20)
    assert rows[0].carried == rows[1].carried == 0, "no segment is wider than a chunk"
    sums = 4 * case.facts.trained_parameters
    assert rows[0].peak == rows[1].peak == whole.peak + sums
    wide = MemorySettings("block", stream=1024)
    some, long_stream = case.memory(wide, 1 << 16), case.memory(wide, 1 << 20)
    stored = [carried_rows(GEOMETRIC, 4, 4, n, 1024)[0] * 4 * 2 * 16 * 2 for n in (1 << 16, 1 << 20)]
    assert long_stream.peak - some.peak == stored[1] - stored[0] > 0 and some.host == long_stream.host == 0
    seconds = [case.time(settings, n).seconds for n in (1 << 14, 1 << 16, 1 << 18)]
    assert seconds[1] / seconds[0] == pytest.approx(4, rel=0.2) and seconds[2] / seconds[1] == pytest.approx(4, rel=0.1)
    short = MemorySettings("block", stream=8192, truncate=True)
    assert case.time(short, 1 << 18).seconds < 0.9 * seconds[2]
    assert case.longest(settings) > 20 * case.longest(MemorySettings("block"))


def test_chunks_are_proposed_where_nothing_else_fits():
    case, settings = plan_of(), [MemorySettings("block")]
    tokens = 1 << 27
    assert recommended(case, settings, tokens) is None
    best = recommended(case, [*settings, *streams(settings)], tokens)
    assert best is not None and best.stream is not None and in_words(best).endswith(f"stream={best.stream}")
