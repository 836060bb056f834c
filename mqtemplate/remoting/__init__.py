"""RocketMQ's remoting protocol over TCP: server side and client side. Names are imported when they are used."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.remoting.client import RemotingClient
    from mqtemplate.remoting.connection import Connection
    from mqtemplate.remoting.identity import ClientTls, Credentials
    from mqtemplate.remoting.server import RemotingServer
    from mqtemplate.remoting.settings import (
        ClientAuth,
        ConnectionLimits,
        RemotingClientSettings,
        RemotingServerSettings,
        ServerTls,
        TlsMode,
    )
    from mqtemplate.remoting.sockets import parse_address

__all__ = [
    "ClientAuth",
    "ClientTls",
    "Connection",
    "ConnectionLimits",
    "Credentials",
    "RemotingClient",
    "RemotingClientSettings",
    "RemotingServer",
    "RemotingServerSettings",
    "ServerTls",
    "TlsMode",
    "parse_address",
]

__getattr__ = late_import(
    __name__,
    {
        "RemotingClient": "mqtemplate.remoting.client",
        "Connection": "mqtemplate.remoting.connection",
        "ConnectionLimits": "mqtemplate.remoting.settings",
        "RemotingServer": "mqtemplate.remoting.server",
        "Credentials": "mqtemplate.remoting.identity",
        "RemotingClientSettings": "mqtemplate.remoting.settings",
        "RemotingServerSettings": "mqtemplate.remoting.settings",
        "parse_address": "mqtemplate.remoting.sockets",
        "ClientAuth": "mqtemplate.remoting.settings",
        "ClientTls": "mqtemplate.remoting.identity",
        "ServerTls": "mqtemplate.remoting.settings",
        "TlsMode": "mqtemplate.remoting.settings",
    },
)
