"""Restarts engines whose configuration was edited, and touches nothing else. Imports neither torch nor vLLM.

Flow of the modules: files, compose, sources, arguments, project → watch, plan → connection, engines, follow, deaths
→ history, starting, reloading, act, tried, apply, loop.
"""
