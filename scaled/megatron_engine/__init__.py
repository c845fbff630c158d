"""One rank of the training engine: Megatron-core behind theory's contracts. The only package that imports megatron."""
