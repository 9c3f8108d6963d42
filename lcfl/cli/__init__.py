"""The command line: LightningCLI over a `Federation`, layered configurations, and the other commands."""
