"""The short form of `bench.cluster_faults`: brokers of a RocketMQ cluster are killed and stopped, with our client."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cluster_faults import run_trial

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(300)]


def test_our_client_loses_and_reorders_nothing_while_brokers_fail(rocketmq: None, tmp_path: Path) -> None:
    """A master killed and one stopped by SIGSTOP, queues added, a consumer added; ORDERLY and concurrent listeners."""
    [(_, faults, outcomes, total)] = run_trial(tmp_path, is_short=True, with_java=False, pause_ms=50)

    assert [fault.name for fault in faults] == ["kill broker-b", "SIGSTOP broker-b", "queues added", "consumer added"]
    assert total.acknowledged > 0
    assert (total.lost, total.out_of_order) == ([], 0)
    killed = outcomes[0].failed
    assert (killed["plain"], killed["async"]) == (0, 0), "another broker accepts them"
