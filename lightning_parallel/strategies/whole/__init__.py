"""The full module: during a run for state dicts, copies and calls outside steps, and after it."""
