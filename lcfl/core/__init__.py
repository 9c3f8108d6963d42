"""Foundations of all other packages: state, messages, the base class of callbacks, random streams and files."""
