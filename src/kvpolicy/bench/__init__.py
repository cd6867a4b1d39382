"""Measurements: engines in processes of their own, stock vLLM beside ours, and what they run on.

``streams`` compares one long stream (``kvpolicy demo`` shows it, ``make bench`` measures it), ``decode`` compares
policies (``kvpolicy bench decode``), ``kernels`` times one event. Only commands import this: no engine or server does.
"""
