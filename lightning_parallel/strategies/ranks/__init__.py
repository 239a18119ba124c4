"""Processes, replicas that act as one, and the order in which ranks meet."""
