"""Measurements of engines on a trained model: the table of defects and its page, calibration, pass rates, layers.

The modules do the work of `firstorder defects`, `calibrate`, `filter` and `doctor --localise`.
"""
