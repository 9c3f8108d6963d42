"""Entries of the contest, a file each: `python -m peers.<name>`, started by `contest.Entry` in its own environment."""
