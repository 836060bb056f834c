"""Records as Spark reads them: blocks of bytes, Arrow columns, ranges of offsets. They need no broker."""
