"""Measurements of engines on a trained model: the table of defects and its page, calibration, pass rates.

Each module is the work behind one command: `firstorder defects`, `calibrate` and `filter`.
"""
