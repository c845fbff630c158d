"""One inference engine: vLLM behind theory's RolloutEngine, with routes, features and pushed weights.

engine.py is the contract, worker.py runs inside vLLM and captures, push.py takes weights, quantize.py is
their format, and routes.py makes records of what vLLM returns.
"""
