"""Long tests in three or nine parts, of which `make test` runs one, and a quarter of the examples of properties."""

from __future__ import annotations

import pytest
from hypothesis import settings

THIRDS = [0, *(pytest.param(number, marks=pytest.mark.thorough) for number in (1, 2))]
"""Values of a parameter ``third``: a test takes every third case from this one on."""
NINTHS = [0, *(pytest.param(number, marks=pytest.mark.thorough) for number in range(1, 9))]
"""Values of a parameter ``ninth``: a test takes every ninth case from this one on. Of the bits of a file, that is
one of nearly each byte, and each time another one."""

QUICK_EXAMPLES = 25
"""Examples of a property in `make test`; a run with the thorough tests has 100, the default of Hypothesis."""


def examples(count: int) -> int:
    """Return the number of examples for a property that needs *count*: a quarter of it in `make test`."""
    return count * settings().max_examples // 100
