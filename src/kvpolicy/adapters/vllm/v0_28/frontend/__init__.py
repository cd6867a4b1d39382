"""The front end: vLLM's facades and its output processor, extended; requests are checked here, at the door."""
