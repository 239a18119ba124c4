"""Files of checkpoints that are complete or not there."""
