"""Keeps a vLLM model's prepared weights in memory so that a restarted engine maps them instead of loading them."""

__version__ = "0.1.0"
