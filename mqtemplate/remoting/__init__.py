"""RocketMQ's remoting protocol over TCP: server side and client side."""

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
