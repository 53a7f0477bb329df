"""Measure memory, communication, throughput and links; compare results on many ranks with results on one."""
