"""Settings that the unit tests share."""

from __future__ import annotations

from hypothesis import settings

# Machines that run tests are busy with other tests: slow is not wrong.
settings.register_profile("cgx", deadline=None, max_examples=60)
settings.load_profile("cgx")
