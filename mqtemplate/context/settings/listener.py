"""The section ``mqtemplate.listener.*``: defaults of all listeners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from mqtemplate.context.config.contradiction import ContradictionError
from mqtemplate.context.settings.properties import CommaList, OptionalText, Properties
from mqtemplate.errors import ListenerError
from mqtemplate.listener.declaration.attributes import read_exceptions
from mqtemplate.listener.declaration.settings import (
    Backoff,
    RetryDefaults,
    RetrySchedule,
    read_schedule,
    retry_delay_ms,
)


def _delay_text(value: Any) -> Any:
    """Return a number of seconds as text; anything else unchanged."""
    return f"{value}s" if isinstance(value, int | float) and not isinstance(value, bool) else value


def _delay_texts(value: Any) -> Any:
    return [*map(_delay_text, value)] if isinstance(value, list) else _delay_text(value)


def _check(read: Callable[[Any], object], value: object) -> None:
    """Read a value; the error is a whole sentence."""
    try:
        read(value)
    except ValueError as exc:
        raise ValueError(f"must be {exc}") from None


class BackoffSettings(Properties):
    """Exponential delays of retries, instead of ``mqtemplate.listener.retry``."""

    first: Annotated[OptionalText, BeforeValidator(_delay_text)] = None
    """Delay before the first retry, such as ``1s``; without it there is no exponential schedule."""
    factor: float = Field(2, ge=1, le=1_000)
    """Each delay is this many times the one before."""
    maximum: Annotated[str, BeforeValidator(_delay_text)] = "1h"
    """Longest delay."""
    jitter: float = Field(0.1, ge=0, le=1)
    """Random share of each delay: with 0.1 it is 90 to 110 percent of the computed one."""
    attempts: int = Field(10, ge=1, le=10_001)
    """Calls of the handler in total, the first one included."""

    @field_validator("first", "maximum")
    @classmethod
    def _check_delay(cls, value: str | None) -> str | None:
        if value is not None:
            _check(retry_delay_ms, value)
        return value


class ListenerDefaultSettings(Properties):
    """Retry policy of all listeners; a value in ``@message_listener`` wins. And the listeners of this process."""

    enabled: bool = True
    """False: this process runs no listeners and schedules. ``mqtemplate run`` runs them all the same."""
    only: CommaList = ()
    """Ids, or last parts of ids, of the listeners and schedules that run in this process. Not given: all."""
    retry: Annotated[CommaList, BeforeValidator(_delay_texts)] = ()
    """Delays before the retries, such as ``[5s, 1m, 1h]``; then the message is a dead letter. Not given: 10s, 30s, 1m,
    … 2h, as in RocketMQ; an ORDERLY queue is retried each second."""
    backoff: BackoffSettings = BackoffSettings()
    retry_for: CommaList = ()
    """Exceptions that are retried, such as ``[OSError, shop.errors.BankError]``; others are dead letters at once. Not
    given: all are retried."""
    not_retry_for: CommaList = ()
    """Exceptions that are not retried; their messages are dead letters at once."""

    @field_validator("retry")
    @classmethod
    def _check_retry(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value:
            _check(read_schedule, value)
        return value

    @field_validator("retry_for", "not_retry_for")
    @classmethod
    def _check_exceptions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            read_exceptions(value)
        except (ValueError, AttributeError):
            raise ValueError(
                f"must be names of exceptions, such as ValueError or shop.errors.OrderError, got {', '.join(value)}"
            ) from None
        return value

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.retry and self.backoff.first is not None:
            raise ContradictionError("and 'backoff.first' are two schedules of retries; keep one", "retry", "backoff")
        try:
            self._schedule()
        except ListenerError as exc:
            raise ContradictionError(str(exc).removeprefix("Backoff: "), "backoff") from exc
        return self

    def _schedule(self) -> RetrySchedule | None:
        backoff = self.backoff
        if backoff.first is None:
            return read_schedule(self.retry) if self.retry else None
        return Backoff(
            backoff.first,
            factor=backoff.factor,
            maximum=backoff.maximum,
            jitter=backoff.jitter,
            attempts=backoff.attempts,
        )

    @property
    def retry_defaults(self) -> RetryDefaults:
        """The section as one value for the listeners."""
        return RetryDefaults(
            retry=self._schedule(),
            retry_for=read_exceptions(self.retry_for),
            not_retry_for=read_exceptions(self.not_retry_for),
        )
