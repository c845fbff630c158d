"""Ray: where ranks and engines run, how weights and records travel between them, and in which order they take turns.

training_group.py (over rank_group.py) and rollout_group.py are theory's contracts over actors, schedule.py the order of
a step's parts, and transfer.py the buckets in which weights travel.
"""
