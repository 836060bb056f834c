"""The messages of a FastAPI or Starlette application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette

from mqtemplate.running.hosting import ProcessApplication

App = TypeVar("App", bound=Starlette)
Lifespan = Callable[[App], AbstractAsyncContextManager[Mapping[str, Any] | None]]


class MQTemplate(ProcessApplication):
    """One `MQApplication` for each process of a web application, which starts and stops with its lifespan.

    ::

        messages = MQTemplate("shop.listeners")
        web = FastAPI(lifespan=messages.lifespan)

    ``async def`` handlers run on the event loop of the server. Each lifespan has a new `MQApplication`, so a test
    client may be entered several times. The arguments are the components and options of `MQApplication`.
    """

    @asynccontextmanager
    async def lifespan(self, web: Starlette) -> AsyncIterator[None]:
        """Lifespan for ``FastAPI(lifespan=...)`` and ``Starlette(lifespan=...)``."""
        web.state.mqtemplate = await self.start_async()
        try:
            yield
        finally:
            await self.stop_async()

    def around(self, inner: Lifespan[App]) -> Lifespan[App]:
        """Return a lifespan that runs another one while the messages work."""

        @asynccontextmanager
        async def lifespan(web: App) -> AsyncIterator[Mapping[str, Any] | None]:
            async with self.lifespan(web), inner(web) as state:
                yield state

        return lifespan
