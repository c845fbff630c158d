"""The cluster world: theory's contracts on Megatron-core (training), vLLM (inference) and Ray (placement)."""
