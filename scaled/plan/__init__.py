"""The needs of a run, computed before it starts: layout, memory, payloads, time."""
