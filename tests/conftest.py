"""Hypothesis profiles. `HEADRACE_PROFILE` chooses: dev (default), ci (derandomised, so a red run is red again),
quick (the same with few examples, for a second interpreter), deep."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("dev", max_examples=60, deadline=None, print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("dev"), max_examples=100, derandomize=True, database=None)
settings.register_profile("quick", parent=settings.get_profile("ci"), max_examples=10)
settings.register_profile(
    "deep", parent=settings.get_profile("dev"), max_examples=5000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HEADRACE_PROFILE", "dev"))
