"""Stand-ins for the core's ports, and what every adapter's block tables have to do."""
