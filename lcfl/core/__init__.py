"""What every room builds on: the state, the messages, the callbacks' base class, random streams and files."""
