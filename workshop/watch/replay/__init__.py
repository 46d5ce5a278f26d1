"""Whoever reads the file of a run."""
