"""Models that pool a sequence into one prediction: heads, survival, intervals, folds."""
