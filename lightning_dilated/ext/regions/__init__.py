"""The outer optimizer of regions that train apart."""
