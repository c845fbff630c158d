"""The instruments that both worlds share: configs, tasks, run folders, traces, verdicts, reports, the doctor.

Nothing here computes an objective (theory/) or runs an engine (sandbox/, scaled/); both worlds and the
command import it. docs/architecture.md names every folder.
"""
