"""An asyncio application: async handlers that await each other, async hooks, and `async for` over messages."""
