"""What to keep and what to evict, in pure Python: standard library and attrs, no clock, no randomness."""
