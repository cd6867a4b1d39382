"""``kvpolicy demo``: a stream on a bounded session and on stock vLLM, shown while it runs, then drawn."""
