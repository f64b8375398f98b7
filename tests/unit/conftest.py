"""Settings that the unit tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# Before anything imports Triton: its kernels run in its interpreter here. Who compiles them has a process of its own.
os.environ["TRITON_INTERPRET"] = "1"

# Machines that run tests are busy with other tests: slow is not wrong.
settings.register_profile("cgx", deadline=None, max_examples=60)
settings.load_profile("cgx")
