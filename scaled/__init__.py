"""The cluster world: theory's contracts on Megatron-core (training), vLLM (inference) and Ray (placement).

run.py is a run from config to verdict, session.py its loop over global steps; promote.py brings a sandbox run's recipe
here, and plan/ says what a config needs before it starts.
"""
