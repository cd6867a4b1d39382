"""The session frontend over HTTP: it knows the port below, not vLLM."""
