"""A run on disk: its directory, metrics, checkpoints and results."""
