"""Ranks: how they are started, how tasks and tensors reach them, and what a rank does with a task."""
