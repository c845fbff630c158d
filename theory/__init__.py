"""What is optimised, and what can be proved of it: pure functions of tensors, the contracts, and the one RL loop."""
