"""What runs on slices of an array under `jax.shard_map`."""
