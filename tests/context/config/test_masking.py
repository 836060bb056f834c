"""Secrets in shown configuration: hidden by the name of a key, and by the form of a value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from mqtemplate.context import explain_settings, load_settings
from mqtemplate.context.config.masking import HIDDEN, is_secret_name, masked, masked_text
from mqtemplate.errors import ConfigurationError

SECRET = "hunter2"


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://bob:hunter2@db:5432/shop",
        "postgresql+psycopg://bob:p%40ss/hunter2@db/shop",
        "mysql://bob:p@ss/hunter2?x@db/shop",
        "redis://:hunter2@cache:6379/0",
        "https://hunter2@github.com/shop",
        "amqp://a:hunter2@one,amqp://b:hunter2@two",
        "mongodb://a:hunter2@one:1,two:2/db?authSource=admin",
        "access:hunter2@10.0.0.1:9876;10.0.0.2:9876",
        "//bob:hunter2@db/shop",
        "jdbc:postgresql://db/shop?user=bob&password=hunter2",
        "jdbc:sqlserver://db;user=bob;password=hunter2;encrypt=true",
        "jdbc:oracle:thin:scott/hunter2@db:1521/shop",
        "kafka://broker?sasl_password=hunter2&acks=all",
        "https://shop/hook?tok%65n=hunter2",
        "Server=db;User Id=sa;Password=a hunter2,b;Encrypt=yes",
        "Driver={ODBC};PWD={a;hunter2};UID=sa",
        "host=db password='a hunter2' user=bob",
        "host=db password=hunter2 user=bob",
        'PlainLoginModule required username="bob" password="a hunter2";',
        '{"user": "bob", "password": "hunter2"}',
        "--db-password hunter2 --verbose",
        "-Ddb.pass=hunter2",
        "Authorization: Bearer hunter2hunter2",
        "bearer hunter2hunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_secret_is_hidden_by_the_form_of_its_text(text: str) -> None:
    shown = masked_text(text)

    assert SECRET not in shown
    assert HIDDEN in shown
    assert masked_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "embedded:./data",
        "10.0.0.1:9876;10.0.0.2:9876",
        "http://localhost:4873/@scope/package",
        "https://shop.example.com/a?email=a@b.example",
        "orders:paid || refunded",
        "topic=orders;queue=2",
        "every 5m",
        "2026-01-31T08:00:00+01:00",
        "C:\\data",
        "",
    ],
)
def test_other_texts_are_shown_as_they_are(text: str) -> None:
    assert masked_text(text) == text


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


@pytest.mark.parametrize("name", ["apiKey", "DB_PASS", "db.pwd", "basicAuth", "X-Api-Key", "sentry.dsn"])
def test_names_of_secrets_are_known_in_each_spelling(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["keys", "monkey", "compass", "auth-enabled", "key-path", "author"])
def test_other_names_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)


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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rocketmq.producer.send-message-timeout", f"http://u:{SECRET}@h"),
        ("rocketmq.name-server", f"u:{SECRET}@h"),
        ("mqtemplate.management.port", f"password={SECRET}"),
        ("mqtemplate.management.address", f"u:{SECRET}@h"),
        ("mqtemplate.management.endpoints", f"https://u:{SECRET}@h"),
    ],
)
def test_no_error_shows_a_secret_in_a_value(key: str, value: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings(None, (), {}, {key: value, "mqtemplate.management.enabled": True})

    assert key in str(refused.value)
    assert SECRET not in str(refused.value)
