"""Settings of the property tests: the same examples in every run, however slow the machine.

``pytest --hypothesis-profile=thorough`` looks much longer, and elsewhere each time.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("kvpolicy", derandomize=True, deadline=None, max_examples=60, stateful_step_count=40)
settings.register_profile("thorough", deadline=None, max_examples=2000, stateful_step_count=80, print_blob=True)
settings.load_profile("kvpolicy")
