"""The needs of a run, computed before it starts: layout, memory, payloads, time.

Each part reads the config and the model's shape alone; nothing here imports an engine or asks for a GPU.
"""
