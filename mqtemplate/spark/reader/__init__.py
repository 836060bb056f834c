"""Reading of messages for Spark: blocks of records from a folder or over the network, and how they are divided."""
