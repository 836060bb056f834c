"""The result as a table, read from Parquet without Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .tax_data import PERIODS, REGIONS


def read_sums(folder: Path) -> Counter[tuple[str, str]]:
    """Return the cents by region and period, over all batches."""
    import pyarrow.parquet

    sums: Counter[tuple[str, str]] = Counter()
    for row in pyarrow.parquet.read_table(folder).to_pylist():
        sums[row["region"], row["period"]] += row["amount_cents"]
    return sums


def table(sums: Counter[tuple[str, str]]) -> list[str]:
    """Return the lines of a table with a row for each region, a column for each period, and totals."""
    rows = {region: [sums[region, period] for period in PERIODS] for region in REGIONS}
    rows["all"] = [sum(cents) for cents in zip(*rows.values(), strict=True)]
    lines = ["".join(f"{head:>16}" for head in ["region", *PERIODS, "2021S4"])]
    for name, cents in rows.items():
        lines.append(f"{name:>16}" + "".join(f"{amount / 100:>16,.2f}" for amount in [*cents, sum(cents)]))
    return lines
