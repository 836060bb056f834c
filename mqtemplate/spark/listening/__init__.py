"""Parts of the container of a Spark listener: payloads, redelivery, metrics."""
