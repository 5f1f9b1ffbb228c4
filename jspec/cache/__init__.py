"""KV caches: what keeps each token's keys and values. `dense` has one buffer a layer."""
