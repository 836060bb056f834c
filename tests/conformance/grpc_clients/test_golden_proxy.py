"""The answers of RocketMQ's proxy that ``golden_proxy.json`` has are those that it gives."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mqtemplate.message import HostAddress
from tests.conformance.grpc_clients.servers import Administrator, local_proxy
from tests.server.grpc_api.grpc_tool import GrpcTool
from tests.server.grpc_api.proxy_probes import PROBES, Answer, World

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(1_800)]

GOLDEN = Path(__file__).parents[2] / "server" / "grpc_api" / "golden_proxy.json"
_UPDATE = "UPDATE_GOLDEN_PROXY"
EITHER = {"ReceiveMessage: no wait time": {40401, "DEADLINE_EXCEEDED"}}
"""Calls with two possible answers: the proxy waits until the deadline, and the client receives what comes first."""


def test_the_proxy_answers_as_recorded(tmp_path: Path) -> None:
    """With ``UPDATE_GOLDEN_PROXY=1`` the answers are written instead."""
    with local_proxy(tmp_path) as server, Administrator(server) as administrator:
        host, _, port = server.endpoint.rpartition(":")
        address = HostAddress(host, int(port))
        world = World(lambda client_id: GrpcTool(address, client_id), administrator, "golden-")
        answers = {name: probe.answer(world) for name, probe in PROBES.items()}
        world.close()

    if os.environ.get(_UPDATE) == "1":
        _write(answers)
    recorded = {f"{each['call']}: {each['input']}": each["code"] for each in json.loads(GOLDEN.read_text())}
    found = {name: answer.code for name, answer in answers.items()}
    assert {name: found.pop(name) in codes for name, codes in EITHER.items()} == dict.fromkeys(EITHER, True)
    assert found == {name: code for name, code in recorded.items() if name not in EITHER}


def _write(answers: dict[str, Answer]) -> None:
    table = [
        {"call": PROBES[name].call, "input": PROBES[name].given, "code": answer.code, "message": answer.message}
        for name, answer in answers.items()
    ]
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in table)
    GOLDEN.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
