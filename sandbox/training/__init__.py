"""Training: the training engine and its arithmetic, the cold start, and the learner around `global_step`.

sandbox/run.py combines them.
"""
