"""The wire: what RocketMQ's clients, brokers and name servers say to each other over TCP."""

from mqtemplate.remoting.addresses import parse_address
from mqtemplate.remoting.client import OnRequest, RemotingClient
from mqtemplate.remoting.connection import Channel, Connection
from mqtemplate.remoting.outstanding import Done
from mqtemplate.remoting.refusals import not_supported
from mqtemplate.remoting.server import Guard, Problem, Processor, RemotingServer
from mqtemplate.remoting.settings import (
    ConnectionLimits,
    Credentials,
    RemotingClientSettings,
    RemotingServerSettings,
)
from mqtemplate.remoting.tls import ClientAuth, ClientTls, ServerTls, TlsMode

__all__ = [
    "Channel",
    "ClientAuth",
    "ClientTls",
    "Connection",
    "ConnectionLimits",
    "Credentials",
    "Done",
    "Guard",
    "OnRequest",
    "Problem",
    "Processor",
    "RemotingClient",
    "RemotingClientSettings",
    "RemotingServer",
    "RemotingServerSettings",
    "ServerTls",
    "TlsMode",
    "not_supported",
    "parse_address",
]
