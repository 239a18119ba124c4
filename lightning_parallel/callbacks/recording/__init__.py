"""The session that records a run, its clocks, and the communication of others."""
