"""Sums of many cells at once."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

import numpy as np  # noqa: E402

from mqtemplate.spark.records import arrow_arrays  # noqa: E402
from mqtemplate.spark.records.arrow_arrays import (  # noqa: E402
    LARGEST_IN_RUN,
    crcs,
    run_matches,
    top_bits,
)

ROWS = st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), min_size=1, max_size=20)


def rows_of_one_size(size: int) -> st.SearchStrategy[list[tuple[bytes, bytes]]]:
    cell = st.binary(min_size=size, max_size=size)
    return st.lists(st.tuples(cell, cell), min_size=1, max_size=20)


CELLS = st.lists(st.binary(max_size=20), min_size=1, max_size=20)


@given(CELLS)
def test_the_sum_of_each_cell_is_its_crc_32(cells: list[bytes]) -> None:
    assert crcs(pa.array(cells, pa.binary())).tolist() == [zlib.crc32(cell) for cell in cells]


@given(st.one_of(CELLS, st.integers(0, 20).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size)))))
def test_the_highest_bit_of_a_sum_is_a_parity(cells: list[bytes]) -> None:
    """The parity of bits that depend on the distance from the end, for cells of one size and of several ones."""
    assert top_bits(pa.array(cells, pa.binary())).tolist() == [zlib.crc32(cell) >> 31 for cell in cells]


def test_the_highest_bit_is_computed_up_to_the_largest_size() -> None:
    cells = [bytes([size % 251]) * size for size in (LARGEST_IN_RUN, LARGEST_IN_RUN - 1, 0)]

    assert top_bits(pa.array(cells, pa.binary())).tolist() == [zlib.crc32(cell) >> 31 for cell in cells]


def matches(rows: list[tuple[bytes, bytes]], stated: list[int]) -> bool:
    """Return the verdict about rows of two cells; their bytes must be the same afterwards."""
    cells = pa.array([cell for row in rows for cell in row], pa.binary())
    verdict = run_matches(cells, np.array(stated, np.uint32))
    assert cells.to_pylist() == [cell for row in rows for cell in row]
    return verdict


@given(st.one_of(ROWS, st.integers(4, 9).flatmap(rows_of_one_size)), st.data())
def test_one_wrong_bit_in_any_row_or_sum_is_noticed(rows: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    """One sum over all rows: a wrong row changes it, whatever follows."""
    stated = [zlib.crc32(first + second) for first, second in rows]
    has_tiny_row = any(0 < len(first + second) < 4 for first, second in rows)
    assert matches(rows, stated) is not has_tiny_row

    wrong_sums = list(stated)
    wrong_sums[data.draw(st.integers(0, len(rows) - 1))] ^= 1 << data.draw(st.integers(0, 31))
    assert not matches(rows, wrong_sums)

    filled = [row for row, (first, _) in enumerate(rows) if first]
    if filled:
        row = data.draw(st.sampled_from(filled))
        changed = bytearray(rows[row][0])
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert not matches([*rows[:row], (bytes(changed), rows[row][1]), *rows[row + 1 :]], stated)


def test_checksums_are_computed_by_the_extra_speed_if_it_is_installed() -> None:
    """They take a tenth of the time of a read."""
    zlib_ng = pytest.importorskip("zlib_ng.zlib_ng")

    assert vars(arrow_arrays)["crc32"] is zlib_ng.crc32
