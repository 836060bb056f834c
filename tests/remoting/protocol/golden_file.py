"""Bytes and texts that Apache RocketMQ's own classes wrote; the head of the file describes them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FILE = Path(__file__).parent / "golden" / "rocketmq-5.5.0.tsv"


@cache
def golden(kind: str) -> dict[str, str]:
    """Return name -> value of all entries of a kind."""
    lines = _FILE.read_text(encoding="utf-8").splitlines()
    entries = [line.split("\t", 2) for line in lines if not line.startswith("#")]
    return {name: value for entry_kind, name, value in entries if entry_kind == kind}
