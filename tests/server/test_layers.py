"""Layers of the server: what carries out a request knows no protocol, so that the servers of several share it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure import Structure

STRUCTURE = Structure(Path(__file__).parents[2])
VALUES = (
    "mqtemplate.remoting.protocol.bodies.",
    "mqtemplate.remoting.protocol.codes",
    "mqtemplate.remoting.protocol.headers.fields",
    "mqtemplate.remoting.protocol.messages",
    "mqtemplate.remoting.protocol.sequenced",
)
"""Modules of the protocol with settings of topics and groups, subscriptions, codes, and messages in a body."""
NEUTRAL = [
    *(name for name in STRUCTURE.modules if name.startswith("mqtemplate.server.core.")),
    *(
        f"mqtemplate.server.{name}"
        for name in (
            "acl.access",
            "pulls.pull_checks",
            "pulls.pull_hold",
            "pulls.raw_reader",
            "requests.caller",
            "requests.refusal",
            "state.groups",
            "state.limits",
            "state.topics",
        )
    ),
]


def reached(module: str) -> set[str]:
    """Return the modules that *module* imports, directly or through modules of the server."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = STRUCTURE.imported_by(waiting.pop()) - found
        found |= new
        waiting += [name for name in new if name.startswith("mqtemplate.server.")]
    return found


def of_requests(module: str) -> list[str]:
    """Return the modules that *module* reaches which have requests, responses, headers or connections."""
    return sorted(
        name for name in reached(module) if name.startswith("mqtemplate.remoting") and not name.startswith(VALUES)
    )


@pytest.mark.parametrize("module", NEUTRAL)
def test_a_neutral_module_reaches_no_request_and_no_connection(module: str) -> None:
    """Neither directly nor through a module that it imports: the types of all its arguments are then neutral too."""
    assert of_requests(module) == []


def test_a_module_that_reaches_a_request_would_be_found() -> None:
    """A guard that cannot fail proves nothing. A processor has both, the response to a pull has a request."""
    of_processor = of_requests("mqtemplate.server.processors.send")
    assert {"mqtemplate.remoting.connection", "mqtemplate.remoting.protocol.command"} <= set(of_processor)
    assert "mqtemplate.remoting.protocol.command" in of_requests("mqtemplate.server.pulls.pull_commands")
