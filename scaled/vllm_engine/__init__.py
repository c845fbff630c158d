"""One inference engine: vLLM behind theory's RolloutEngine, with routes, features and pushed weights."""
