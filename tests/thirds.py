"""Long tests in three parts, of which `make test` runs one."""

from __future__ import annotations

import pytest

THIRDS = [0, *(pytest.param(number, marks=pytest.mark.thorough) for number in (1, 2))]
"""Values of a parameter ``third``: a test takes every third case from this one on."""
