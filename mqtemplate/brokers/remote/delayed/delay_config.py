"""Settings of a broker that decide when delayed messages are due."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.delay.levels import DelayLevels
from mqtemplate.errors import BrokerError, ConfigurationError
from mqtemplate.numbers import parse_number
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand

_VALID_MS = 60_000


class DelayConfig(NamedTuple):
    """Settings of one broker.

    Attributes:
        levels: The delay of each level.
        slot_ms: Length of a slot of the timer wheel; None for a broker without timers.
        timer_age_ms: Age of the oldest record that can belong to a pending timer. A longer timer is stored again.
    """

    levels: DelayLevels
    slot_ms: int | None
    timer_age_ms: int

    @classmethod
    def parse(cls, text: str) -> DelayConfig:
        """Parse the response to GET_BROKER_CONFIG: lines ``name=value``.

        Raises:
            ValueError: A value is missing, or no number above 0.
        """
        values = dict(line.partition("=")[::2] for line in text.splitlines())
        levels = DelayLevels.parse(values.get("messageDelayLevel", ""))
        if "timerPrecisionMs" not in values:  # RocketMQ before 5.0
            return cls(levels, None, 0)
        slot_ms = _number(values, "timerPrecisionMs")
        roll_ms = _number(values, "timerRollWindowSlot") * slot_ms
        return cls(levels, slot_ms, min(roll_ms, _number(values, "timerMaxDelaySec") * 1_000))


def _number(values: Mapping[str, str], name: str) -> int:
    number = parse_number(values.get(name))
    if number is None or number <= 0:
        raise ValueError(f"{name} must be a number above 0, got {values.get(name)!r:.64}")
    return number


class DelayConfigs:
    """Settings of the brokers, requested at their first use and again after a minute."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._by_broker: dict[str, tuple[int, DelayConfig]] = {}

    def of(self, broker_name: str) -> DelayConfig:
        """Return the settings of a broker.

        Raises:
            BrokerError: The broker does not answer, or refuses: access control may forbid this request.
        """
        now_ms = self._context.clock.now_ms()
        requested_ms, config = self._by_broker.get(broker_name, (0, None))
        if config is None or now_ms - requested_ms > _VALID_MS:
            request = RemotingCommand.request(RequestCode.GET_BROKER_CONFIG)
            address = self._context.routes.address(broker_name)
            response = self._context.call(address, request, f"get the delay levels of broker {broker_name!r}")
            try:
                config = DelayConfig.parse(response.body.decode())
            except (ValueError, ConfigurationError) as exc:
                raise BrokerError(
                    f"broker {broker_name!r} answers GET_BROKER_CONFIG without delay levels: {exc}"
                ) from exc
            self._by_broker[broker_name] = now_ms, config
        return config
