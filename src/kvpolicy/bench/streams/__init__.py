"""One long stream of chunks through stock vLLM or a bounded session, and the figures of both."""
