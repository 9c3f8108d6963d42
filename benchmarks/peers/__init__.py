"""The entries of the contest, one file each. `contest.Runner` starts `python -m peers.<name>` in its environment."""
