"""LossByPosition against sums computed by hand, packed or not."""

import csv
import math
from collections import defaultdict

import pytest
import torch

from lightning_dilated import LongNetMLM
from lightning_dilated.callbacks import LossByPosition

from ...models import PATTERN, SIZES, loader, tiny, trainer

N = 40
BOUNDS = [0, 9, 10, 23, N]


def batch(kind):
    """Return two rows, or one packed row. Some labels are ignored."""
    rows = 1 if kind == "documents" else 2
    tokens, labels = (torch.randint(11, (rows, N)) for _ in range(2))
    labels[:, [3, 17]] = -100
    if kind == "documents":
        return {"tokens": tokens, "labels": labels, "cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32)}
    if kind == "lengths":
        labels[1, 21:] = -100
        return {"tokens": tokens, "labels": labels, "lengths": torch.tensor([N, 21])}
    return {"tokens": tokens, "labels": labels}


def by_hand(model, batches):
    """Add label by label. Return {(part, first): [nats, labels]}."""
    sums = defaultdict(lambda: [0.0, 0])
    for data in batches:
        losses = model.token_losses(data)
        for row, position in (data["labels"] != -100).nonzero().tolist():
            start, stop = 0, int(data["lengths"][row]) if "lengths" in data else N
            if "cu_seqlens" in data:
                start = max(b for b in BOUNDS if b <= position)
                stop = min(b for b in BOUNDS if b > position)
            at, size = position - start, stop - start
            for key in (("octave", 2 ** int(math.log2(at + 1)) - 1), ("eighth", at * 8 // size)):
                sums[key][0] += float(losses[row, position])
                sums[key][1] += 1
    return sums


def check_rows(model, data, rows, rel=1e-6):
    """Check that rows of LossByPosition equal sums by hand."""
    with torch.no_grad():
        want = by_hand(model, data)
    assert {(r["part"], r["first"]) for r in rows} == set(want)
    for row in rows:
        nats, labels = want[row["part"], row["first"]]
        assert row["tokens"] == labels and row["bits"] == pytest.approx(nats / labels / math.log(2), rel=rel)


@pytest.mark.parametrize("kind", ["whole", "lengths", "documents"])
def test_equals_sums_by_hand(kind, tmp_path):
    torch.manual_seed(1)
    model, data = tiny(), [batch(kind), batch(kind)]
    callback = LossByPosition(table=False)
    run = trainer(callbacks=[callback], default_root_dir=tmp_path, precision="64-true")
    run.validate(model, loader(*data), verbose=False)
    check_rows(model, data, callback.rows)
    for part in ("octave", "eighth"):
        rows = [r for r in callback.rows if r["part"] == part]
        mean = sum(r["bits"] * r["tokens"] for r in rows) / sum(r["tokens"] for r in rows)
        assert mean == pytest.approx(float(run.callback_metrics["val_bits_per_byte"]), rel=1e-6)
    assert model.watch_losses is None
    with (tmp_path / "loss_by_position.csv").open() as file:
        assert [float(r["bits"]) for r in csv.DictReader(file)] == [r["bits"] for r in callback.rows]
    assert (tmp_path / "loss_by_position.png").stat().st_size > 1000


def test_every_validation_is_appended(tmp_path, capsys):
    run = trainer(callbacks=[LossByPosition()], default_root_dir=tmp_path, max_epochs=2, num_sanity_val_steps=1)
    run.fit(tiny(dtype=torch.float32).train(), loader(batch("whole")), loader(batch("whole")))
    with (tmp_path / "loss_by_position.csv").open() as file:
        assert {r["step"] for r in csv.DictReader(file)} == {"1", "2"}
    assert "loss by position after step 2" in capsys.readouterr().out


def test_a_failed_validation_leaves_the_model_alone(tmp_path):
    model = tiny()
    with pytest.raises(ValueError, match="no 'labels'"):
        trainer(callbacks=[LossByPosition()], default_root_dir=tmp_path).validate(
            model, loader({"tokens": torch.zeros(1, 4, dtype=torch.int64)})
        )
    assert model.watch_losses is None


def test_another_model_is_refused():
    with pytest.raises(TypeError, match=r"LossByPosition needs.*a LongNetLM or HFCausalLM.*got LongNetMLM"):
        trainer(callbacks=[LossByPosition()]).validate(LongNetMLM(PATTERN, **SIZES), loader(batch("whole")))
