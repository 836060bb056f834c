"""The table of delay levels of our own servers, changed while they run."""

from __future__ import annotations

from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.errors import ConfigurationError, UnsupportedError
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand

_ACCEPTED = (ResponseCode.SUCCESS, ResponseCode.INVALID_PARAMETER)


def change_delay_levels(context: ClientContext, text: str) -> None:
    """See `RemoteBroker.change_delay_levels`."""
    masters = context.routes.masters()
    context.instance.register_at(masters)
    others = [address for address in masters if not context.instance.announced.get(address)]
    if others or not masters:
        raise UnsupportedError(
            f"the delay levels of {', '.join(others) or 'this cluster'} cannot be changed from here: a RocketMQ broker "
            "reads them at start; set messageDelayLevel in its settings and restart it"
        )
    for address in masters:
        request = RemotingCommand.request(
            RequestCode.UPDATE_BROKER_CONFIG, body=f"messageDelayLevel={' '.join(text.split())}\n".encode()
        )
        response = context.call(address, request, "change the delay levels", accept=_ACCEPTED)
        if response.code == ResponseCode.INVALID_PARAMETER:
            raise ConfigurationError(response.remark or f"{text!r} is not a level table")
