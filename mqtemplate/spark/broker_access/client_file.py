"""Access key and TLS settings for a cluster: from the environment or a file of each machine, never from an option.

Reads, writes, the pending view and changes by DataFrame all use them. Options show in plans, in the event log of Spark
and in its web interface. The file is JSON::

    {"access-key": "spark", "secret-key": "...", "tls": {"trust-cert-path": "/etc/ca.pem"}}
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from pathlib import Path
from typing import Any

from mqtemplate.errors import ConfigurationError
from mqtemplate.remoting.settings import ClientTls, Credentials, RemotingClientSettings
from mqtemplate.spark.broker_access.location import (
    ACCESS_KEY,
    CLIENT_FILE,
    SECRET_KEY,
    SECURITY_TOKEN,
    TRUST_CERT_PATH,
)

_KEYS = ("access-key", "secret-key", "security-token", "tls")


def client_settings(path: str | None) -> RemotingClientSettings:
    """Return the settings of this machine's connections.

    Args:
        path: The file of the option ``clientFile``; None for the environment.

    Raises:
        ConfigurationError: The file is missing or damaged, or a key is unknown or missing.
    """
    path = path or os.environ.get(CLIENT_FILE)
    if path is not None:
        return _settings(_read(Path(path)), f"{path} on {socket.gethostname()}")
    names = (("access-key", ACCESS_KEY), ("secret-key", SECRET_KEY), ("security-token", SECURITY_TOKEN))
    given: dict[str, Any] = {key: os.environ[name] for key, name in names if os.environ.get(name)}
    if os.environ.get(TRUST_CERT_PATH):
        given["tls"] = {"trust-cert-path": os.environ[TRUST_CERT_PATH]}
    return _settings(given, f"the environment of {socket.gethostname()} ({ACCESS_KEY}, {SECRET_KEY})")


def _read(path: Path) -> dict[str, Any]:
    where = f"client file {str(path)!r} on {socket.gethostname()}"
    try:
        given = json.loads(path.read_text("utf-8-sig"))
    except OSError as exc:
        raise ConfigurationError(
            f"{where} cannot be read ({exc.strerror}); each machine that runs tasks needs it"
        ) from exc
    except ValueError as exc:
        raise ConfigurationError(f"{where} is not JSON ({exc})") from exc
    if not isinstance(given, dict):
        raise ConfigurationError(f"{where} is not a JSON object; its keys are {', '.join(_KEYS)}")
    return given


def _settings(given: dict[str, Any], where: str) -> RemotingClientSettings:
    unknown = sorted(set(given) - set(_KEYS))
    if unknown:
        raise ConfigurationError(f"{where}: key {unknown[0]!r} is unknown; known are {', '.join(_KEYS)}")
    if ("access-key" in given) != ("secret-key" in given):
        raise ConfigurationError(f"{where} has only one of access-key and secret-key; give both, or none")
    credentials = None
    if "access-key" in given:
        credentials = Credentials(
            access_key=given["access-key"], secret_key=given["secret-key"], security_token=given.get("security-token")
        )
    return RemotingClientSettings(tls=_tls(given["tls"], where) if "tls" in given else None, credentials=credentials)


def _tls(given: Any, where: str) -> ClientTls:
    known = {field.name.replace("_", "-") for field in dataclasses.fields(ClientTls)}
    unknown = sorted(set(given) - known) if isinstance(given, dict) else [given]
    if unknown:
        raise ConfigurationError(f"{where}: tls: {unknown[0]!r} is unknown; known are {', '.join(sorted(known))}")
    return ClientTls(**{name.replace("-", "_"): value for name, value in given.items()})
