"""Hash functions of Java and of files."""
