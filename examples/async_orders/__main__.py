"""An asyncio application: async handlers that await each other, async hooks, and `async for` over messages."""

import sys

from .app import main

if __name__ == "__main__":
    sys.exit(main())
