"""The needs of a run, computed before it starts: layout, memory, payloads, time.

Each part reads only the config and the model's shape; nothing here imports an engine or needs a GPU.
"""
