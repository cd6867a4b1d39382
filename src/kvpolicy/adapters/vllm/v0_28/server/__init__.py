"""The server process: vLLM's own with our engine in it, and the doctor."""
