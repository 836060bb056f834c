"""Long tests in three or nine parts, of which `make test` runs one."""

from __future__ import annotations

import pytest

THIRDS = [0, *(pytest.param(number, marks=pytest.mark.thorough) for number in (1, 2))]
"""Values of a parameter ``third``: a test takes every third case from this one on."""
NINTHS = [0, *(pytest.param(number, marks=pytest.mark.thorough) for number in range(1, 9))]
"""Values of a parameter ``ninth``: a test takes every ninth case from this one on. Of the bits of a file, that is
one of nearly each byte, and each time another one."""
