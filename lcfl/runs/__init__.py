"""The files of a run: its directory, metrics, checkpoints and results."""
