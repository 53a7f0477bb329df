"""One rank that trains over a link: region_link_job.py alone|regions|data NAME. It writes the mean seconds per step.

"alone" trains without the other rank; "regions" takes an outer step every EVERY steps; "data" averages gradients.
"""

import json
import os
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch

import lightning_dilated as ld

#: warm-up steps (also the steps between outer steps), and the number of measured outer steps
EVERY, ROUNDS = 20, 2
WAYS = {"alone": {}, "regions": {"regions": 2, "outer": ld.OuterSteps(every=EVERY, delay=2)}, "data": {}}


class Clock(pl.Callback):
    """Records when each step ends."""

    def __init__(self):
        self.ends = []

    def on_train_batch_end(self, *args):
        self.ends.append(time.perf_counter())


def main():
    way, name = sys.argv[1:]
    rank = os.environ["RANK"]
    if way == "alone":
        for variable in [x for x in os.environ if x.startswith("TORCHELASTIC_")]:
            del os.environ[variable]
        os.environ.update(RANK="0", WORLD_SIZE="1", NODE_RANK="0", GROUP_RANK="0", LOCAL_RANK="0")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29777")  # an address within its own network namespace
    torch.set_num_threads(1)
    pl.seed_everything(0)
    clock = Clock()
    trainer = pl.Trainer(
        strategy=ld.RingDilatedStrategy(sequence_size=1, **WAYS[way]),
        accelerator="cpu",
        devices=1,
        num_nodes=1 if way == "alone" else 2,
        max_steps=EVERY * (ROUNDS + 1),
        num_sanity_val_steps=0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    model = ld.LongNetLM(ld.DilatedPattern.geometric(128, 512), dim=256, depth=8, num_heads=4)
    data = ld.data.ByteDataModule(torch.__file__, seq_len=512, val_fraction=0.1, test_fraction=0.0)
    trainer.fit(model, data)
    measured = clock.ends[-1] - clock.ends[EVERY - 1]
    numbers = {"seconds": measured / (EVERY * ROUNDS), "parameters": sum(p.numel() for p in model.parameters())}
    Path(f"{name}_{rank}.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main()
