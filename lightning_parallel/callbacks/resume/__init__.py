"""A run that goes on where a killed one ended."""
