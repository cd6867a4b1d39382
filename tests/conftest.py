"""Settings of the property tests: the same examples in every run, however slow the machine.

``pytest --hypothesis-profile=thorough`` looks much longer, and elsewhere each time.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long examples take to make says nothing of what is tested.
any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("kvpolicy", any_speed, derandomize=True, max_examples=60, stateful_step_count=40)
settings.register_profile("thorough", any_speed, max_examples=2000, stateful_step_count=80, print_blob=True)
settings.load_profile("kvpolicy")
