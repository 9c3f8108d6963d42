"""`Federation` and what it starts: settings, checks, the session on every rank, and newcomers."""
