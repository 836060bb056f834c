"""Sessions of Spark: the search for Java, the start of its JVM, and the package for executors."""
