"""Ray: where ranks and engines run, how weights and records travel between them, and in which order they take turns."""
