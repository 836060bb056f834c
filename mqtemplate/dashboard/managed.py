"""The dashboard of an application or of a server, as ``mqtemplate.management.dashboard`` sets it up."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from mqtemplate.actuator.actuator import Actuator
from mqtemplate.actuator.client import LocalActuator
from mqtemplate.actuator.response import Responder
from mqtemplate.admin.broker_admin import BrokerAdmin
from mqtemplate.admin.embedded import EmbeddedAdmin
from mqtemplate.admin.remote import RemoteAdmin
from mqtemplate.broker import Broker
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.brokers.remote.broker import RemoteBroker
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.features import ManagementSettings
from mqtemplate.dashboard.access import Access
from mqtemplate.dashboard.audit import AuditLog, default_audit_path
from mqtemplate.dashboard.dashboard import Dashboard
from mqtemplate.dashboard.sources.source import OpenSource
from mqtemplate.errors import ConfigurationError


def managed_dashboard(broker: Broker, actuator: Responder, settings: ManagementSettings, title: str) -> Dashboard:
    """Return the dashboard of the application of this process, or of its server. Reading needs the token too.

    Raises:
        ConfigurationError: The audit log cannot be written.
    """
    section = settings.dashboard
    assert settings.token is not None, "the settings are checked"
    token = settings.token.get_secret_value()
    is_loopback = ipaddress.ip_address(settings.address).is_loopback
    access = Access(
        token,
        allow_changes=section.allow_changes,
        reads_need_token=True,
        allowed_hosts=(*section.allowed_hosts, *(() if is_loopback else (settings.address,))),
        clock=broker.clock,
    )
    path = Path(section.audit_log) if section.audit_log is not None else default_audit_path()
    return Dashboard(
        OpenSource(_admin_of(broker), title),
        LocalActuator(actuator, token),
        access=access,
        audit=AuditLog(path if section.allow_changes else None, broker.clock),
        clock=broker.clock,
    )


def application_dashboard(broker: Broker, settings: AppSettings, actuator: Actuator) -> Dashboard:
    """Return the dashboard of an application, for its context."""
    management = settings.mqtemplate.management
    return managed_dashboard(broker, actuator, management, management.name or broker.name)


def _admin_of(broker: Broker) -> BrokerAdmin:
    if isinstance(broker, EmbeddedBroker):
        return EmbeddedAdmin(broker)
    if isinstance(broker, RemoteBroker):
        return RemoteAdmin(broker, broker.client_context)
    raise ConfigurationError(
        f"the dashboard needs an embedded broker or a cluster, and the broker is a {type(broker).__name__}; "
        "turn mqtemplate.management.dashboard.enabled off"
    )
