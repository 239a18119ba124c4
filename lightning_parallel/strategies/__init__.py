"""Lightning strategies: thin classes, no algorithms."""
