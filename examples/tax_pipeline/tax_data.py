"""The input: a file with invented tax payments of the last quarter of 2021."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from pydantic import BaseModel

REGIONS = ["north", "east", "south", "west"]
PERIODS = ["2021-10", "2021-11", "2021-12"]
FIRST_ID = 1_001  # so that 4466 is among a few thousand


class TaxPayment(BaseModel, frozen=True):
    """One payment; the body of one message, as JSON."""

    id: str
    region: str
    period: str
    amount_cents: int


def write_payments(path: Path, count: int = 4_000, seed: int = 2021) -> None:
    """Write *count* payments, one JSON object per line; equal seeds give equal files."""
    generator = random.Random(seed)
    payments = (
        TaxPayment(
            id=str(FIRST_ID + number),
            region=generator.choice(REGIONS),
            period=generator.choice(PERIODS),
            amount_cents=generator.randint(1_00, 5_000_00),
        )
        for number in range(count)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{payment.model_dump_json()}\n" for payment in payments), encoding="utf-8")


def read_payments(path: Path) -> list[TaxPayment]:
    """Read the payments from a file."""
    with path.open(encoding="utf-8") as lines:
        return [TaxPayment.model_validate_json(line) for line in lines]


def sums_by_region_and_period(payments: list[TaxPayment]) -> Counter[tuple[str, str]]:
    """Return the cents by region and period, added without broker and Spark: the expected result of the pipeline."""
    sums: Counter[tuple[str, str]] = Counter()
    for payment in payments:
        sums[payment.region, payment.period] += payment.amount_cents
    return sums
