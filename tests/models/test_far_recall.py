"""Far recall: a branch over the whole sequence beats the control with walls, and shifted layers beat unshifted ones.

A small run of research/users.md's experiment (section 3A), trained on the CPU; accuracy over the queries, chance 1 in 8.
"""

import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.data import FarRecallDataModule

N = 128
NEAR = ([16, 64], [1, 4])
FAR = ([16, 64, N], [1, 4, 8])


def recalled(branches, **options):
    """Accuracy over 512 new samples after training."""
    torch.manual_seed(0)
    data = FarRecallDataModule(seq_len=N, num_pairs=4, vocabulary=8, batch_size=32, train_size=96000)
    model = LongNetLM(DilatedPattern.longnet(*branches), vocab_size=17, dim=64, depth=3, num_heads=8, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    steps = 3000
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.05)
    batches = iter(data.train_dataloader())
    for _ in range(steps):
        loss, _ = model.token_mean(next(batches))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    right = asked = 0
    with torch.no_grad():
        for batch in data.val_dataloader():
            at = batch["labels"] >= 0
            right += int((model(batch["tokens"]).argmax(-1) == batch["labels"])[at].sum())
            asked += int(at.sum())
    return right / asked


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_far_branch_beats_walls_and_shifts_beat_none(record_property):
    walled, far = recalled(NEAR), recalled(FAR)
    shifted = recalled(FAR, shift_layers="odd", shift_below=N)
    print(f"\nfar recall: walled {walled:.3f}, far branch {far:.3f}, shifted {shifted:.3f}")
    assert walled < 0.2 < 0.5 < far < shifted
