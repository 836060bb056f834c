"""A set of offsets that is filled one by one and searched by numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.delay.pending_rows import OffsetSet

offsets = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.lists(st.lists(offsets, max_size=5), max_size=4), st.lists(offsets, max_size=5))
def test_it_agrees_with_a_python_set(batches: list[list[int]], others: list[int]) -> None:
    """Also if offsets are added after a lookup."""
    tested, model = OffsetSet(), set[int]()
    for batch in batches:
        for offset in batch:
            tested.add(offset)
            model.add(offset)
        wanted = [*others, *model]

        assert tested.values().tolist() == sorted(model)
        assert tested.contains(np.array(wanted, np.int64)).tolist() == [offset in model for offset in wanted]
        assert len(tested) == len(model)
