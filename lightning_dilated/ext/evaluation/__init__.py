"""Tests of how models use a long context: tasks, samples, and results by position, distance and depth."""
