"""JVM of a Spark driver: search for Java, start of the JVM, archive of its classes."""
