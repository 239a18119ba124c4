"""The user's hooks: hooks that read a shard as the full tensor, and hooks that change the model."""
