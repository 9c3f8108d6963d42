"""The round loop: who takes part, what is sent, clustered, aggregated, evaluated and logged."""
