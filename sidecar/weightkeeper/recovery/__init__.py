"""The recovery benchmark: replace an engine in every way there is, and see whether an agent's work comes back intact.

`agent` does a job whose state lies outside the model server; `check` compares the finished job with an uninterrupted
one. `scenarios` are ways to lose an engine and to get it back; `runner` goes through them, with a `witness` of what
comes back, and keeps what it saw as a `result.Run`, which `report` shows. Only the agent needs packages of its own.
"""
