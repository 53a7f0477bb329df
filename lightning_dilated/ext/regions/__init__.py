"""The outer optimizer, which synchronises regions that train separately."""
