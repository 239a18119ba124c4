"""The user's hooks: those that take a shard for the tensor, and those that change the model."""
