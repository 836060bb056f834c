"""Requests of a hand-over: the mover and the operators of another process use the part of this broker in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from mqtemplate.broker.hand_over import HandOverError, HandOverPhase, MovedMessage, ReserveFilter
from mqtemplate.engine.engine import Engine
from mqtemplate.remoting.protocol.bodies.own_requests import HandOverRequestHeader
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.requests.registration import answers


@dataclass(frozen=True, slots=True)
class HandOverProcessor:
    """The part of this broker in a hand-over, for other processes."""

    engine: Engine

    @answers(RequestCode.GET_HAND_OVER, slow=True)
    def _get(self, header: HandOverRequestHeader) -> bytes:
        part, msg_id, topic = self.engine.hand_over, header.msg_id or "", header.topic or None
        with _refusing():
            match header.action:
                case "state":
                    state = part.state()
                    return _json(None if state is None else json.loads(state.to_json()))
                case "counts":
                    return _json(asdict(part.counts()))
                case "remaining":
                    return _json(part.remaining())
                case "moved":
                    ended = part.moved(msg_id, topic)
                    return _json(None if ended is None else json.loads(ended.to_json()))
                case "is_reserved":
                    return _json(part.is_reserved(msg_id, topic))
        raise _unknown(header)

    @answers(RequestCode.CHANGE_HAND_OVER, slow=True)
    def _change(self, header: HandOverRequestHeader, request: RemotingCommand) -> bytes:
        part, owner = self.engine.hand_over, header.owner or ""
        with _refusing():
            values: Any = json.loads(request.body or b"null")
            match header.action:
                case "begin":
                    state = part.begin(str(values["target"]), _texts(values["topics"]), _texts(values["groups"]))
                    return state.to_json().encode()
                case "change":
                    return part.change(HandOverPhase(values)).to_json().encode()
                case "note_error":
                    part.note_error(owner, None if values is None else str(values))
                case "note_brokers":
                    part.note_brokers(owner, _texts(values))
                case "lock":
                    return _json(part.lock(owner, int(values)))
                case "unlock":
                    part.unlock(owner)
                case "reserve":
                    return _json(part.reserve(owner, int(values["count"]), ReserveFilter.from_json(values["filter"])))
                case "transit":
                    return _json([json.loads(each.to_json()) for each in part.transit(int(values))])
                case "settle":
                    part.settle(owner, [MovedMessage.from_json(each) for each in _texts(values)])
                case _:
                    raise _unknown(header)
        return _json(None)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise ValueError("a list of texts is expected")
    return values


def _unknown(header: HandOverRequestHeader) -> RefusedError:
    return RefusedError(ResponseCode.INVALID_PARAMETER, f"{header.action!r:.40} is no action of a hand-over")


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except HandOverError as exc:
        raise RefusedError(ResponseCode.ILLEGAL_OPERATION, str(exc)) from exc
    except (ValueError, KeyError, TypeError, OverflowError) as exc:
        raise RefusedError(ResponseCode.INVALID_PARAMETER, f"the request is not valid: {exc!r:.200}") from exc
