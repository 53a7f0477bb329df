"""Checkpoints of all ranks in one folder, written in the background, and the lock of a run on its folder."""
