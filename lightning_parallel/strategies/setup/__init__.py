"""From a module to a sharded, split one: plans, split points, tables."""
