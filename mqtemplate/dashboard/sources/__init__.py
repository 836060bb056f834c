"""Sources of what the pages show: brokers for several threads, cached values, rates."""
