"""TRL's own trainer, with an inference engine of the sandbox in the place of vLLM.

The model is transformers' class, the loss and the loop are TRL's; the engine's defects are this project's. So a finding
of the sandbox can be tried in a trainer that this project has not written. Written for TRL 1.16 and transformers 5.
"""
