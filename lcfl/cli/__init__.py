"""The command line: LightningCLI for a `Federation`, layered configurations, and the other commands."""
