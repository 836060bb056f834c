"""``mqtemplate.cluster.*``: what a client of a RocketMQ cluster can be told beside ``rocketmq.*``."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from mqtemplate.context.settings.properties import ContradictionError, OptionalSecret, OptionalText, Properties


class ClusterSettings(Properties):
    """How to use a RocketMQ cluster; without ``rocketmq.name-server: host:port`` nothing here is read."""

    poll_name_server_interval_ms: int = Field(30_000, gt=0)
    """Milliseconds between two looks at where topics are."""
    heartbeat_broker_interval_ms: int = Field(30_000, gt=0)
    """Milliseconds between two heartbeats; brokers forget a client after two minutes without."""
    persist_consumer_offset_interval_ms: int = Field(5_000, gt=0)
    """Milliseconds in which commits gather before the brokers are told."""
    offset_path: Path | None = None
    """The folder with the progress of broadcasting groups; ``~/.rocketmq_offsets`` if not given."""
    tls_trust_cert_path: OptionalText = None
    """A PEM file of who may issue the servers' certificates; those that this machine trusts if not given."""
    tls_cert_path: OptionalText = None
    """A PEM file with this client's own certificate, where servers ask for one. Together with ``tls-key-path``."""
    tls_key_path: OptionalText = None
    """Its private key."""
    tls_key_password: OptionalSecret = None
    """The password of that key."""
    tls_check_host_name: bool = True
    """Whether a certificate must be for the host that was asked for."""
    tls_insecure: bool = False
    """Trust whoever answers, for trials. RocketMQ calls it test mode, and has it on unless told otherwise."""

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.tls_cert_path is None) != (self.tls_key_path is None):
            given, absent = ("cert", "key") if self.tls_cert_path else ("key", "cert")
            raise ContradictionError(f"needs 'tls-{absent}-path' beside it; give both or none", f"tls_{given}_path")
        return self
