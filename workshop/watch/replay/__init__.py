"""Read the file of a run."""
