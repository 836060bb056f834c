"""Access of Spark's processes to a broker: over TCP, or by opening its folder."""
