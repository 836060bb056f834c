"""Without the toolchain of a client, its tests are skipped with the reason, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.client_programs import CLIENTS, ClientUnavailableError


@pytest.mark.parametrize(
    ("client", "tool", "advice"),
    [
        ("go", "go", "Go 1.19 or newer (Debian: apt-get install golang-go)"),
        ("ali-ons", "node", "Node.js 16 or newer with npm (Debian: apt-get install nodejs npm)"),
        ("rust", "cargo", "Rust 1.95 or newer (https://rustup.rs)"),
        ("rust-v4", "cargo", "Rust 1.95 or newer (https://rustup.rs)"),
    ],
)
def test_a_missing_toolchain_is_named(
    client: str, tool: str, advice: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ClientUnavailableError) as raised:
        CLIENTS[client].command()

    assert str(raised.value) == f"{tool} is not on the PATH; install {advice} to test with it"


def test_an_old_toolchain_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "go"
    old.write_text("#!/bin/sh\necho go version go1.13.8 linux/amd64\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ClientUnavailableError) as raised:
        CLIENTS["go"].command()

    assert str(raised.value) == (
        "go must be 1.19 or newer, and it printed 'go version go1.13.8 linux/amd64'; "
        "install Go 1.19 or newer (Debian: apt-get install golang-go) to test with it"
    )
