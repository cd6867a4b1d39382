"""Models to measure with, made once without a model hub."""
