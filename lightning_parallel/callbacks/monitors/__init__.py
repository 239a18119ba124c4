"""One callback a file: each measures or guards one thing."""
