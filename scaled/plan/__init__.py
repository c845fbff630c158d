"""What a run would need before it starts: layout, memory, payloads, time."""
