"""Stand-ins for the core's ports, and the contract suites that they and the real adapters pass."""
