"""`Federation` and its components: settings, checks, the session on every rank, and newcomers."""
