"""A federation whose clients are machines of their own: messages, nodes, and the transport between them."""
