"""Objectives and their provable properties, as pure functions of tensors; the contracts; the one RL loop."""
