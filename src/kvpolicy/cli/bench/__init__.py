"""``kvpolicy bench``: a policy's engine against vLLM's own, and what an event costs by itself."""
