"""The section ``mqtemplate.cluster.*``: the client of a RocketMQ cluster, beside ``rocketmq.*``."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Self

from pydantic import field_validator, model_validator
from pydantic.dataclasses import dataclass

from mqtemplate.brokers.remote.cluster.settings import ClientIntervals, RemoteSettings
from mqtemplate.context.config.contradiction import check_both_or_none
from mqtemplate.context.settings.properties import SECTION_CONFIG, OptionalSecret, OptionalText, duration_in, same_as


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class ClusterSettings(ClientIntervals):
    """The client of a RocketMQ cluster; only ``rocketmq.name-server: host:port`` uses it."""

    offset_path: Path | None = None
    """Directory with the offsets of broadcasting groups; ``~/.rocketmq_offsets`` if not given."""

    auto_batch: bool = same_as(RemoteSettings, "auto_batch")

    tls_trust_cert_path: OptionalText = None
    """PEM file with the issuers of the servers' certificates; by default the issuers that this machine trusts."""

    tls_cert_path: OptionalText = None
    """PEM file with the client's own certificate, if servers require one. Together with ``tls-key-path``."""

    tls_key_path: OptionalText = None
    """PEM file with the private key of the certificate."""

    tls_key_password: OptionalSecret = None
    """Password of the private key."""

    tls_check_host_name: bool = True
    """True: the certificate must be for the host name of the address."""

    tls_insecure: bool = False
    """True: accept any certificate, for trials. RocketMQ calls this test mode, and it is RocketMQ's default."""

    _milliseconds = field_validator(*(field.name for field in fields(ClientIntervals)), mode="before")(duration_in(1))

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        check_both_or_none(self, "tls_cert_path", "tls_key_path")
        return self
