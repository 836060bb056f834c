"""One processor for each kind of request that producers and consumers send."""
