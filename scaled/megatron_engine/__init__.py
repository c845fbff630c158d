"""One rank of the training engine: Megatron-core behind theory's contracts. The only package that imports megatron.

rank.py scores and updates, policy.py runs a pass over micro-batches, replay.py routes it, weights.py reads and writes
Hugging Face names, and parts.py joins what ranks return.
"""
