"""Tests of a long context: tasks, samples, losses by distance and depth."""
