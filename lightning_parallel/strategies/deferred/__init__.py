"""Models built in `configure_model` whose tensors get memory only where a rank owns them."""
