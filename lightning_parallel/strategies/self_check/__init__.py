"""The comparison of the user's own step with one process."""
