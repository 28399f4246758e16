"""Offline calibration: what a model's heads look at and what its layers lose, kept as a profile."""
