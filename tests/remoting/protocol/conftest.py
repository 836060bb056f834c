"""Fixture: the two JSON libraries that headers are coded with."""

from __future__ import annotations

import pytest

from mqtemplate.remoting.protocol import json_header


@pytest.fixture(params=["with orjson", "standard library only"])
def json_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select each of the two JSON libraries; headers are the same with both."""
    if request.param == "standard library only":
        monkeypatch.setattr(json_header, "_dump", json_header._dump_plainly)
        monkeypatch.setattr(json_header, "_load", json_header._load_plainly)
    else:
        pytest.importorskip("orjson")
