"""Slides of pathology: files, samples, encoder, pretraining, heat maps."""
