"""``jitney bench`` measures a running server; ``jitney tune`` finds the batching of a model."""
