"""Objectives and their provable properties, as pure functions of tensors; the contracts; the one RL loop.

contracts.py says what engines and tasks promise, loop.py runs one global step, algorithm.py holds the recipe of a run.
Nothing here touches a file, an engine, a device or the global random state.
"""
