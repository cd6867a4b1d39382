"""Engines in child processes: the parent's side, the child's side, and what the log of one says."""
