"""The scheduler process: vLLM's scheduler and block manager, extended by sessions and policies."""
