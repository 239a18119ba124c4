"""A step of a pipeline: what microbatches log, return, keep and weigh."""
