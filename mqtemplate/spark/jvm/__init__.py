"""The JVM of a Spark driver: finding Java, starting it, and an archive of its classes."""
