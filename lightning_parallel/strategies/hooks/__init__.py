"""The user's hooks: full tensors for hooks, and hooks that change the model."""
