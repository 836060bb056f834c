"""Secrets in shown configuration: hidden by the name of a key, and by the form of a value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from mqtemplate.context import explain_settings, load_settings
from mqtemplate.context.config.masking import HIDDEN, masked, masked_text

SECRET = "hunter2"


def test_a_private_key_is_hidden() -> None:
    text = "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----"

    assert masked_text(text) == HIDDEN


@pytest.mark.parametrize(
    "part", ["a", "a+", "a.", " ", "=", "a:", "a@", "://", "a://", "'", "{", "a=", ",", "password"]
)
def test_a_long_text_is_read_once(part: str) -> None:
    """It is at most as large as a file of settings; a quadratic search would take hours."""
    assert masked_text(part * 100_000 + f" password={SECRET}").find(SECRET) < 0


def test_a_secret_is_hidden_at_any_depth_and_in_any_type() -> None:
    shown = masked(
        {
            "servers": [{"password": SECRET, "host": "a"}, {"nested": [{"url": f"http://u:{SECRET}@h"}]}],
            "given": SecretStr(SECRET),
            "bytes": f"password={SECRET}".encode(),
            "pin": {"token": 4711},
            "is_token": True,
        }
    )

    assert SECRET not in json.dumps(shown)
    assert shown["servers"][0] == {"password": HIDDEN, "host": "a"}
    assert shown["pin"]["token"] == HIDDEN
    assert shown["is_token"] is True


CONFIGURATION = f"""
rocketmq:
  name-server: embedded:memory
  producer:
    secret-key: {SECRET}
    access-key: {SECRET}
shop:
  database: postgresql://bob:{SECRET}@db/shop
  copies: ["redis://:{SECRET}@a", "redis://:{SECRET}@b"]
  servers:
    - host: a
      password: {SECRET}
    - host: b
      login: {{user: bob, credential: [{SECRET}]}}
  hook: "https://hook.example.com/?access_token={SECRET}"
  broker: "host=b;password={SECRET}"
  credentials:
    user: {SECRET}
  from-placeholder: ${{shop.database}}
"""


def test_no_place_in_the_configuration_shows_a_secret(tmp_path: Path) -> None:
    """The documents of the actuator, `config show` and the dashboard are made of this list."""
    (tmp_path / "application.yml").write_text(CONFIGURATION, "utf-8")

    shown = {each.key: each.value for each in explain_settings(load_settings(tmp_path, (), {}, {}))}

    assert SECRET not in json.dumps(shown, default=str)
    assert shown["shop.database"] == f"postgresql://bob:{HIDDEN}@db/shop"
    assert shown["shop.servers"][0] == {"host": "a", "password": HIDDEN}
    assert shown["mqtemplate.server.tls.client-auth"] != HIDDEN
