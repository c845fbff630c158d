"""Routing of a mixture of experts as data: records of routes, their replay, prediction and comparison.

passes.py says which pass of a mode routes how, record.py holds routes, replay.py replays them under a ledger, and
predictor.py learns them.
"""
