"""Crashes: the files that a SIGKILL would leave."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.operations.doctor import examine

SMALL = EmbeddedSettings(mapped_file_size_commit_log=1 << 20, max_hash_slot_num=1_000, max_index_num=4_000)


def after_a_crash(store: Path, now_ms: int | None = None, *, may_be_damaged: bool = False) -> EmbeddedBroker:
    """Return a started broker on a copy of the files that a kill would leave now. The doctor has opened them before."""
    copy = Path(tempfile.mkdtemp(prefix="crashed-", dir=store.parent), "store")
    shutil.copytree(store, copy, ignore=shutil.ignore_patterns("lock"))
    report = examine(copy, SMALL)
    assert report.problem is None
    assert may_be_damaged or not report.is_damaged
    broker = EmbeddedBroker(copy, SMALL, VirtualClock() if now_ms is None else VirtualClock(now_ms))
    broker.start()
    return broker
