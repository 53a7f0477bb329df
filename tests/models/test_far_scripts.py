"""benchmarks/far on the CPU: exact codes equal the definition, in one pass or in chunks, and a tiny run writes rows."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "far"
NAMES = ("codes", "task", "model", "recall", "stream", "pairs", "versions", "package")


@pytest.fixture(scope="module")
def far():
    """Import the scripts in the way that they import each other."""
    before = {name: sys.modules.pop(name, None) for name in NAMES}
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)
            if before[name] is not None:
                sys.modules[name] = before[name]


def by_definition(codes, q, k, v, z_q, z_k, null, latest, probes):
    """Compute the definition by loops over queries and rows."""
    out = torch.zeros_like(q)
    for b in range(len(q)):
        looked_up, code = codes.probed(z_q[b], probes), codes.numbers(z_k[b])
        for p in range(q.shape[1]):
            rows = [j for c in looked_up[:, p] for j in [j for j in range(p + 1) if code[j] == c][-latest:]]
            agree = (z_q[b, p].log_softmax(-1) + z_k[b, rows].log_softmax(-1)).logsumexp(-1).sum(-1)
            scores = k[b, rows] @ q[b, p] * q.shape[-1] ** -0.5 + agree
            out[b, p] = torch.cat([null, scores]).softmax(0)[1:] @ v[b, rows]
    return out


def by_sorting(codes, q, k, v, z_q, z_k, null, latest, probes):
    """Call `codes.exact` as the model does."""
    (batch, size, dim), (groups, many) = q.shape, z_q.shape[-2:]
    sequence = torch.arange(batch)[:, None] * many**groups
    position = torch.arange(size).expand(batch, -1).flatten()
    packed = torch.cat([k, v, z_k.softmax(-1).flatten(2)], -1).flatten(0, 1)
    rows = codes.Rows((codes.numbers(z_k) + sequence).flatten(), position, packed)
    query = torch.cat([q, z_q.softmax(-1).flatten(2)], -1).flatten(0, 1).repeat(probes, 1)
    code = (codes.probed(z_q, probes) + sequence).flatten()
    read = codes.exact(query, code, position.repeat(probes), rows, latest, dim, groups)
    return codes.mix(read.shaped(probes, batch, size), null[0])[0]


@pytest.mark.parametrize(
    "batch,size,groups,many,latest,probes", [(2, 37, 2, 3, 4, 2), (1, 150, 1, 2, 5, 1), (2, 90, 3, 2, 70, 3)]
)
def test_sorting_equals_the_definition(far, batch, size, groups, many, latest, probes):
    """Outputs and gradients are equal up to rounding in the softmax's float32."""
    gen = torch.Generator().manual_seed(size)
    draw = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64, requires_grad=True)  # noqa: E731
    inputs = [draw(batch, size, 8) for _ in range(3)] + [draw(batch, size, groups, many) for _ in range(2)] + [draw(1)]
    weight = torch.randn(batch, size, 8, generator=gen, dtype=torch.float64)
    outs = [f(far["codes"], *inputs, latest, probes) for f in (by_definition, by_sorting)]
    torch.testing.assert_close(*outs, atol=2e-6, rtol=0)
    for one, other in zip(*(torch.autograd.grad((out * weight).sum(), inputs) for out in outs), strict=True):
        torch.testing.assert_close(one, other, atol=5e-6, rtol=0)


def test_soft_equals_exact_where_all_codes_are_equal(far):
    """If all codes are equal and every row is kept, outputs and training losses agree."""
    codes, gen = far["codes"], torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 30, 8, generator=gen) for _ in range(3))
    z_q, z_k = (
        torch.cat([torch.full((2, 30, 2, 1), 9.0), torch.randn(2, 30, 2, 2, generator=gen)], -1) for _ in range(2)
    )
    query, packed = torch.cat([q, z_q.softmax(-1).flatten(2)], -1), torch.cat([k, v, z_k.softmax(-1).flatten(2)], -1)
    sequence, position = torch.arange(2)[:, None] * 9, torch.arange(30).expand(2, -1).flatten()
    rows = codes.Rows((codes.numbers(z_k) + sequence).flatten(), position, packed.flatten(0, 1))
    code = (codes.probed(z_q, 1) + sequence).flatten()
    exact = codes.exact(query.flatten(0, 1), code, position, rows, 30, 8, 2)
    exact, soft = (read.shaped(1, 2, 30) for read in (exact, codes.soft(query, packed, 8, 2)))
    for one, other in zip(codes.mix(exact, torch.zeros(())), codes.mix(soft, torch.zeros(())), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert torch.equal(exact.count, soft.count)


@pytest.mark.parametrize("far_layer", [0, 2])
def test_chunks_equal_the_whole(far, far_layer):
    model = far["model"]
    torch.manual_seed(far_layer)
    options = {"far_layer": far_layer, "query_taps": far_layer == 2, "start": "trigram"}
    sizes = model.Sizes(96, width=32, groups=2, codes=4, latest=8, **options)
    net, settings = model.Model(sizes).eval(), model.Settings(local=16, probes=2)
    tokens = torch.randint(0, 96, (1, 256))
    with torch.no_grad():
        whole, aux = net(tokens, torch.arange(256)[None], settings)
        carried = [model.Carried() for _ in net.layers]
        parts = [net(tokens[:, i : i + 64], torch.arange(64)[None], settings, i, carried)[0] for i in range(0, 256, 64)]
    assert aux["rows"].max() == 16  # the limit is reached, so the carried state did drop rows
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("haystack", ["filler", "noise", "text"])
def test_task(far, haystack, tmp_path):
    """Each queried key occurs once in the first half, at the reported distance and before its value."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 40)
    task = far["task"].Task(haystack, keys=16, per_pair=16, text=str(text) if haystack == "text" else None)
    tokens, positions, answers, distance = task.draw(256, 3, torch.Generator().manual_seed(1), repeats=2)
    assert positions.shape == (3, 32) and positions.min() >= 128
    pair = positions - distance
    for at in (pair, positions):
        torch.testing.assert_close(tokens.gather(1, at), tokens.gather(1, positions))
        torch.testing.assert_close(tokens.gather(1, at + 1), answers)
    assert (tokens[:, :128] >= task.first).sum() == 3 * 2 * 16 and tokens.max() < task.vocabulary


@pytest.mark.parametrize("arm", ["codes", "dense", "rotary", "window"])
def test_tiny_run(far, arm, tmp_path):
    """Every arm trains and writes rows and weights. Codes can be streamed."""
    options = (
        "--device cpu --width 16 --keys 8 --per-pair 16 --queries 2 --lengths 32 64 --steps 3 2 --local 8 16 "
        f"--soft-until 32 --tokens 128 --test 64 256 --test-tokens 256 --out {tmp_path} --name {arm} --far {arm}"
    )
    far["recall"].main(options.split())
    rows = [json.loads(line) for line in (tmp_path / f"{arm}.jsonl").read_text().splitlines()]
    tests = [row for row in rows if "test" in row]
    assert [(row["test"], row["probes"]) for row in tests] == (
        [(64, 2), (64, 1), (256, 2), (256, 1)] if arm == "codes" else [(64, None), (256, None)]
    )
    if arm != "codes":
        with pytest.raises(SystemExit):
            far["stream"].main([str(tmp_path / f"{arm}.pt"), "--tokens", "64", "--out", str(tmp_path)])
        return
    far["stream"].main([str(tmp_path / "codes.pt"), *f"--tokens 256 --chunk 64 --device cpu --out {tmp_path}".split()])
    row = json.loads((tmp_path / "stream.jsonl").read_text())
    assert row["stream"] == 256 and row["asked"] == 8 and row["rows kept"] == 256


def test_keys_of_two_tokens_in_a_full_haystack(far):
    """Each pair of tokens occurs once in each half. The answer in the second half is the value from the first half."""
    task = far["task"].Task("filler", keys=16, key_tokens=2, full=True)
    tokens, positions, answers, distance = task.draw(96, 2, torch.Generator().manual_seed(0))
    assert positions.shape == (2, 16)
    for row, places, values, far_back in zip(tokens, positions, answers, distance, strict=True):
        pairs = [tuple(row[i : i + 2].tolist()) for i in range(0, 48, 3)]
        assert len(set(pairs)) == 16
        for at, value, back in zip(places.tolist(), values.tolist(), far_back.tolist(), strict=True):
            assert row[at + 1] == value and pairs.index(tuple(row[at - 1 : at + 1].tolist())) * 3 == at - 1 - back
    many = far["task"].Task("filler", keys=256, key_tokens=2, full=True)
    (keys,) = many.keys_of(1, 256, torch.Generator().manual_seed(0))
    assert len(keys.unique(dim=0)) == 256
    # a single token does not identify a pair: 256 random tokens have 162 different values on average
    assert all(140 < len(tokens.unique()) < 185 for tokens in keys.T)
    with pytest.raises(ValueError, match="a stream has keys of one token"):
        far["task"].Stream(task, 96, 48, 0)


def write_trees(folder):
    """Write two versions of 40 files; one line in eight differs in the second version."""
    for i in range(40):
        lines = [b"value_%d_%d = function(%d)  # a line of its own\n" % (i, j, i * j) for j in range(30)]
        for name in ("old", "new"):
            path = folder / name / f"part{i % 3}" / f"file{i}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(lines))
            lines[i % 8 :: 8] = [b"changed_%d = %d\n" % (j, i) for j in range(len(lines[i % 8 :: 8]))]


@pytest.fixture
def corpus(far, tmp_path):
    """Pack two versions of 40 files."""
    write_trees(tmp_path)
    counts = far["pairs"].pack([[tmp_path / "old", tmp_path / "new"]], [], tmp_path / "corpus.bin")
    assert counts["files"] == 40 and counts["versions"] == 80
    return tmp_path / "corpus.bin"


def test_pairs_of_versions(far, corpus):
    """The second half is the new version of the first half's files, from the same line; held-out files are not trained."""
    size, pairs = 512, far["pairs"]
    trained, held = pairs.read(corpus)
    assert len(trained) + len(held) == 40 and 1 <= len(held) <= 6
    task = pairs.Versions(corpus, copies=0.5)
    old, new = (b"".join(x) for x in zip(*trained, strict=True))
    tokens, at, answers, _ = task.draw(size, 64, torch.Generator().manual_seed(0))
    assert torch.equal(tokens.gather(1, at + 1), answers) and at.shape == (64, size - 1)
    copies = 0
    for row in tokens:
        sample = bytes(row.tolist())
        first, again = sample[: size // 2], sample[size // 2 :]
        assert first in old + old[:size] and (first == again or again in new + new[:size])
        assert first[:40] == again[:40]  # the line that both begin with, half a sample apart
        copies += first == again
        assert not any(x[60:100] in sample for pair in held for x in pair)
    assert 20 < copies < 44
    starts = task.held.walk(size)
    assert len(starts) > 1 and (starts[1:] - starts[:-1]).min() >= size // 2
    even = torch.full((1, 1, 1), 1 / 256).expand(256, 256, 256)
    assert pairs.lookup_bits(sample, even, size) < 3 < pairs.lookup_bits(sample, even, 0)


def test_tiny_versions(far, corpus, tmp_path):
    """Codes in two layers learn, and a run writes its rows."""
    options = (
        f"--data {corpus} --device cpu --width 16 --heads 2 --depth 4 --far-layers 1 3 --lengths 32 64 --local 8 16 "
        f"--steps 3 2 --soft-until 32 --tokens 64 --test 64 --samples 2 --taught-from 1 --out {tmp_path}"
    )
    far["versions"].main(options.split())
    rows = [json.loads(line) for line in (tmp_path / "versions.jsonl").read_text().splitlines()]
    assert [row["probes"] for row in rows if "test" in row] == [2, 1]
    assert all(row["samples"] == 2 and 0 < row["second"] < 9 and row["rows"] >= 0 for row in rows if "test" in row)


def test_tiny_package(far, corpus, tmp_path):
    """The package's model trains, and its stored weights are tested on streams: the state ends with all rows or fewer."""
    sizes = f"--device cpu --width 16 --heads 2 --depth 2 --local 8 --warmup 1 --samples 2 --out {tmp_path} --name run"
    task = "--keys 8 --per-pair 16 --queries 2 --chunk 64 --least 64"
    far["package"].main(f"{sizes} {task} --lengths 32 --steps 2 --tokens 64 --test 64".split())
    far["package"].main(f"{sizes} {task} --load {tmp_path / 'run.pt'} --test 256".split())
    far["package"].main(f"{sizes} --far-layers 1 --data {corpus} --lengths 64 --steps 1 --tokens 64 --test 128".split())
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    short, long, versions = (row for row in rows if "test" in row)
    assert (short["asked"], long["asked"]) == (4, 8) and all(0 <= row["right"] <= 100 for row in (short, long))
    assert (short["rows kept"], long["rows kept"]) == (64, 256)  # in so few tokens no code has 64 rows
    assert versions["samples"] == 2 and 0 < versions["second"] < 9 and len(versions["eighths"]) == 8
    assert 0 <= versions["rows"] <= 128


def test_rows_of_the_package_are_of_asked_queries(far, tmp_path):
    """Rows are counted at asked queries alone, also if they are in earlier chunks."""
    package = far["package"]
    a = package.options(f"--device cpu --width 16 --heads 2 --depth 1 --out {tmp_path}".split())
    model = package.model_of(a, 32)
    model.configure_model()
    model.eval()
    (head,) = package.hashed_heads(model)
    head.query_code.load_state_dict(head.key_code.state_dict())  # so queries have codes of rows
    tokens = torch.randint(0, 2, (1, 96), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(tokens, package.IGNORE)
    labels[0, [40, 90]] = 5
    counted = labels != package.IGNORE
    parts = [package.Part(*(x[:, i : i + 48] for x in (tokens, labels, counted))) for i in (0, 48)]
    got = package.read(model, parts, a)
    seen = []
    handle = head.query_code.register_forward_hook(lambda m, x, z: seen.append(z))
    other = head.key_code.register_forward_hook(lambda m, x, z: seen.append(z))
    with torch.no_grad():
        model.stream(tokens, labels, chunk=96, per_token=True)
    handle.remove(), other.remove()
    z_q, z_k = (z.view(96, 4, 16) for z in seen)
    looked_up = far["codes"].probed(z_q, 2)
    code = far["codes"].numbers(z_k)
    reads = [sum(min(64, int((code[: p + 1] == c).sum())) for c in looked_up[:, p]) for p in (40, 90)]
    assert sum(reads) > 4 and got.rows.tolist() == [sum(reads), 2]
    assert not head.training and head.terms.labelled is None
