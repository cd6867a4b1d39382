"""``kvpolicy bench decode``: policies against vLLM's own engine, in turns on the same prompts."""
