"""What engines do to a trained model, measured: the table of defects and its page, calibration, pass rates.

Each module is the work behind one command: `firstorder defects`, `calibrate` and `filter`.
"""
