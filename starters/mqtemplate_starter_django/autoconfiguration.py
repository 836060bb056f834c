"""Clean database connections around the handlers of any application in a process of Django."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from mqtemplate.clock import Clock
from mqtemplate.context import ApplicationContext, AppSettings, AutoConfiguration


class DjangoAutoConfiguration(AutoConfiguration):
    """Starter that closes old database connections before and after each call of a handler, as around requests.

    A thread of a listener never ends a request, so its connection would stay open, also after the database closed it.
    """

    requires = ("django",)
    after = ("logging",)

    def condition(self, settings: AppSettings) -> bool | str:
        apps = sys.modules.get("django.apps")  # never imported here: most programs do not use Django
        return bool(apps and apps.apps.ready) or "Django is not set up in this process"

    def contribute(self, context: ApplicationContext) -> None:
        if context.has(Clock) and context.get(Clock).is_virtual:  # type: ignore[type-abstract]  # selected by its base class
            # A test owns its connections, and there are no threads. Django's test client does not close them either.
            context.note_nothing_to_do("the clock is virtual: the test owns the connections")
            return
        context.add_handler_scope(clean_connections, clean_connections_async)


@contextmanager
def clean_connections() -> Iterator[None]:
    """Close the connections of this thread that are too old or broken, before and after."""
    from django.db import close_old_connections

    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()


@asynccontextmanager
async def clean_connections_async() -> AsyncIterator[None]:
    """Do the same in the thread in which Django runs the queries of coroutines."""
    from asgiref.sync import sync_to_async
    from django.db import close_old_connections

    close = sync_to_async(close_old_connections)
    await close()
    try:
        yield
    finally:
        await close()
