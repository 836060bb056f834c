"""The names of keys that ``mqtemplate broker -c`` knows are those that RocketMQ reads."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mqtemplate.running.broker_conf import KNOWN_NAMES

CONFIGS = (
    "org.apache.rocketmq.common.BrokerConfig",
    "org.apache.rocketmq.store.config.MessageStoreConfig",
    "org.apache.rocketmq.remoting.netty.NettyServerConfig",
    "org.apache.rocketmq.remoting.netty.NettyClientConfig",
)
PEER = Path(__file__).parents[2] / ".rocketmq"
_SETTER = re.compile(r"public .* set(\w)(\w+)\(")
_OF_A_CONTAINER = {"inBrokerContainer", "isBrokerContainer", "brokerConfigPath"}
"""Setters that RocketMQ itself calls; they are not keys."""


@pytest.mark.conformance
@pytest.mark.parametrize("version", ["rocketmq-4", "rocketmq-5"])
def test_every_key_of_rocketmq_is_known(version: str, rocketmq: None) -> None:
    """RocketMQ sets a key by the setter of its name, ``MixAll.properties2Object``."""
    javap = shutil.which("javap")
    if javap is None:
        pytest.skip("no javap: it comes with a JDK")
    names = set()
    for config in CONFIGS:
        shown = subprocess.run(
            [javap, "-cp", f"{PEER / version}/*", config], capture_output=True, text=True, check=True, timeout=60
        )
        names |= {first.lower() + rest for first, rest in _SETTER.findall(shown.stdout)}

    assert len(names) > 100
    assert names - KNOWN_NAMES - _OF_A_CONTAINER == set()
