"""Routing of a mixture of experts as data: records of routes, their replay, prediction and comparison.

passes.py has the routing of each mode's passes, record.py holds routes, replay.py replays them under a ledger, and
predictor.py learns them.
"""
