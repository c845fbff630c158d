"""Objectives and their provable properties, as pure functions of tensors; the contracts; the one RL loop.

contracts.py is what engines and tasks promise, loop.py one global step, algorithm.py the recipe that it runs. No file,
no engine, no device and no global random state is touched here.
"""
