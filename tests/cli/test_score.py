"""`lightning-dilated score`: rows equal hand-computed logits, every kind of variant, and errors before any work."""

import csv
import gzip

import pytest
import torch

import lightning_dilated as ld

from ..ext.genomes.test_fasta import made, write
from ..ext.genomes.test_variants import vcf

pytestmark = pytest.mark.full

SIZES = {"vocab_size": 5, "dim": 16, "depth": 2, "num_heads": 4, "max_seq_len": 32}
PATTERN = ld.DilatedPattern.longnet([4, 16], [1, 2])
ONE = made(200)
LETTERS = "ACGT"


def other(base, by=1):
    return LETTERS[(LETTERS.index(base) + by) % 4]


#: a record of 200 bases, and a record of 20 bases that is shorter than the window
SNV = f"one 101 rs1 {ONE[100]} {other(ONE[100])},{other(ONE[100], 2)}"
LINES = [
    SNV,
    f"one 51 . {ONE[50:53]} {other(ONE[50])}{ONE[51]}{other(ONE[52])}",  # changes two of three bases
    f"one 61 ins {ONE[60]} {ONE[60]}ACG",
    f"one 71 del {ONE[70:75]} {ONE[70]}",
    f"one 1 =first {ONE[0]} {other(ONE[0])}",
    f"one 200 last {ONE[199]} {other(ONE[199])}",
    f"one 81 sym {ONE[80]} <DEL>,*",
    f"one 81 same {ONE[80]} {ONE[80]}",
    f"one 91 long {ONE[90]} {ONE[90] * 40}",
    "two 3 N N A",
    "two 5 short A C",
]


@pytest.fixture
def folder(tmp_path):
    """A genome, variants, and a model of every kind."""
    write(tmp_path, one=ONE, two="GGNGA" + "CATG" * 4)
    vcf(tmp_path, *LINES, name="v.vcf.gz")
    for kind in (ld.LongNetLM, ld.LongNetMLM):
        torch.manual_seed(0)
        model = kind(PATTERN, **SIZES)
        for p in model.parameters():
            p.data.mul_(3)
        model.save_pretrained(tmp_path / kind.__name__)
    return tmp_path


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


ARGUMENTS = ("--vcf", "v.vcf.gz", "--fasta", "a.fa", "--out", "out/s.csv")


@pytest.mark.parametrize("kind", ["LongNetLM", "LongNetMLM"])
def test_every_kind_of_variant(cli, folder, kind):
    result = cli("score", "--ckpt_path", kind, *ARGUMENTS, "--batch_size", 3).ok()
    rows = table(folder / "out" / "s.csv")
    assert [(r["chrom"], r["pos"], r["id"]) for r in rows[:3]] == [("one", "101", "rs1")] * 2 + [("one", "51", ".")]
    assert rows[5]["id"] == "'=first"  # quoted, so that no spreadsheet runs it as a formula
    notes = {row["id"]: row["note"] for row in rows}
    assert [row["id"] for row in rows if row["note"]] == [
        "sym",
        "sym",
        "same",
        "long",
        *(["N"] if kind != "LongNetLM" else []),
    ]
    assert notes["same"] == "alleles are equal" and notes["long"] == "alleles do not fit into a window of 32 bases"
    assert [row["note"] for row in rows if row["id"] == "sym"] == ["symbolic allele", "deleted with another variant"]
    assert all((row["score"] == "") == bool(row["note"]) for row in rows)
    for row in rows:
        if not row["note"]:
            difference = float(row["alt_log_likelihood"]) - float(row["ref_log_likelihood"])
            assert float(row["score"]) == difference != 0
    assert f"scores: {'out/s.csv'} (13 alleles, {9 if kind == 'LongNetLM' else 8} of them scored)" in result.out
    model = getattr(ld, kind).from_pretrained(folder / kind)
    start = 100 - 15
    sequence = ONE[start : start + 32]
    changed = sequence[:15] + other(ONE[100], 2) + sequence[16:]
    reference, alternative = (ld.data.encode_bases(x)[None] for x in (sequence, changed))
    with torch.no_grad():
        if kind == "LongNetLM":
            logs = [model.eval()(x).double().log_softmax(-1)[0, :-1] for x in (reference, alternative)]
            by_hand = [
                float(y.gather(1, x[0, 1:, None]).sum()) for x, y in zip((reference, alternative), logs, strict=True)
            ]
            assert rows[1]["ref_bases"] == rows[1]["alt_bases"] == "31.0"
        else:
            masked = reference.clone()
            masked[0, 15] = model.mask_token
            log = model.eval()(masked)[0, 15].double().log_softmax(-1)
            by_hand = [float(log[x[0, 15]]) for x in (reference, alternative)]
            assert rows[1]["ref_bases"] == "1.0" and rows[2]["ref_bases"] == "2.0"
            assert rows[3]["ref_bases"] == rows[3]["alt_bases"] == "19.0"  # three bases, and eight on either side
    assert float(rows[1]["ref_log_likelihood"]) == pytest.approx(by_hand[0], rel=1e-5)
    assert float(rows[1]["alt_log_likelihood"]) == pytest.approx(by_hand[1], rel=1e-5)


@pytest.mark.parametrize("kind", ["LongNetLM", "LongNetMLM"])
def test_strands(cli, folder, kind):
    """`both` is the mean of the two strands. A variant has the same score on the other strand of the reverse complement."""
    scores = {}
    for strands in ("forward", "reverse", "both"):
        cli("score", "--ckpt_path", kind, *ARGUMENTS, "--strands", strands, "--window", 21).ok()
        scores[strands] = [float(row["score"] or "nan") for row in table(folder / "out" / "s.csv")]
    mean = torch.tensor([scores["forward"], scores["reverse"]], dtype=torch.float64).mean(0)
    torch.testing.assert_close(torch.tensor(scores["both"], dtype=torch.float64), mean, equal_nan=True)
    backwards = ld.data.decode_bases(ld.data.reverse_complement(ld.data.encode_bases(ONE)))
    write(folder, name="b.fa", one=backwards)
    turned = [LETTERS[3 - LETTERS.index(x)] for x in (ONE[100], other(ONE[100]))]
    vcf(folder, f"one 100 . {turned[0]} {turned[1]}", name="b.vcf")
    arguments = ("--vcf", "b.vcf", "--fasta", "b.fa", "--out", "b.csv", "--window", 21, "--strands", "reverse")
    assert cli("score", "--ckpt_path", kind, *arguments).code == 0
    assert float(table(folder / "b.csv")[0]["score"]) == pytest.approx(scores["forward"][0], rel=1e-4)


def test_a_packed_genome_reads_alike(cli, folder):
    (folder / "a.fa.gz").write_bytes(gzip.compress((folder / "a.fa").read_bytes()))
    base = ("score", "--ckpt_path", "LongNetLM", "--vcf", "v.vcf.gz", "--cache_dir", "cache")
    for fasta, out in (("a.fa", "1.csv"), ("a.fa.gz", "2.csv")):
        assert cli(*base, "--fasta", fasta, "--out", out).code == 0
    assert (folder / "1.csv").read_bytes() == (folder / "2.csv").read_bytes()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"one 101 . {other(ONE[100])} A", f"line 4: REF is '{other(ONE[100])}' at one:101, and "),
        ("chr1 3 . A C", "line 4: CHROM is 'chr1'"),
        ("one 3 . A", "line 4 has 4 columns"),
    ],
)
def test_a_wrong_line_is_an_error_before_work(cli, folder, line, message):
    vcf(folder, SNV, line)
    result = cli("score", "--ckpt_path", "LongNetLM", "--vcf", "v.vcf", "--fasta", "a.fa", "--out", "s.csv")
    assert result.code == 2 and message in result.err and not (folder / "s.csv").exists()


def test_wrong_settings(cli, folder):
    model = ld.LongNetLM(PATTERN, dim=16, depth=1)
    model.save_pretrained(folder / "text")
    result = cli("score", "--ckpt_path", "text", *ARGUMENTS)
    assert "holds a LongNetLM with vocab_size 256; scoring variants takes" in result.err
    ld.LongNetLM(PATTERN, vocab_size=5, dim=16, depth=1).save_pretrained(folder / "endless")
    assert "give --window" in cli("score", "--ckpt_path", "endless", *ARGUMENTS).err
    for option, message in (("--window", "--window must be at least 2"), ("--batch_size", "--batch_size must be at")):
        assert message in cli("score", "--ckpt_path", "LongNetLM", *ARGUMENTS, option, 0).err
    assert "in --fasta" in cli("score", "--ckpt_path", "LongNetLM", *ARGUMENTS[:3], "none.fa", *ARGUMENTS[4:]).err
