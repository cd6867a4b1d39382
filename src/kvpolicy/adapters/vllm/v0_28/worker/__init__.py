"""The worker process: vLLM's worker and model runner, extended; it moves entries and shifts positions."""
