"""Starts an engine's server and brings it back: by a fork that has its imports, at a reload, after a crash.

`loop` is the whole; what it drives is `server` (one generation), `forking` and `template` (where servers come from),
`processes` and `tree` (what belongs to a server, and how it ends), and `preparing` (the next configuration).
"""
