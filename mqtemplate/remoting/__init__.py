"""RocketMQ's remoting protocol over TCP: server side and client side. Names are imported when they are used."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.remoting.client import RemotingClient
    from mqtemplate.remoting.connection import Connection
    from mqtemplate.remoting.limits import ConnectionLimits
    from mqtemplate.remoting.server import RemotingServer
    from mqtemplate.remoting.settings import Credentials, RemotingClientSettings, RemotingServerSettings
    from mqtemplate.remoting.sockets import parse_address
    from mqtemplate.remoting.tls import ClientAuth, ClientTls, ServerTls, TlsMode

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
        "ConnectionLimits": "mqtemplate.remoting.limits",
        "RemotingServer": "mqtemplate.remoting.server",
        "Credentials": "mqtemplate.remoting.settings",
        "RemotingClientSettings": "mqtemplate.remoting.settings",
        "RemotingServerSettings": "mqtemplate.remoting.settings",
        "parse_address": "mqtemplate.remoting.sockets",
        "ClientAuth": "mqtemplate.remoting.tls",
        "ClientTls": "mqtemplate.remoting.tls",
        "ServerTls": "mqtemplate.remoting.tls",
        "TlsMode": "mqtemplate.remoting.tls",
    },
)
