"""Adapter for vLLM 0.28.x: everything that names a symbol of that engine."""
