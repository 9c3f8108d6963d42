"""Round loop: sampling, exchange, clustering, aggregation, evaluation and logging."""
