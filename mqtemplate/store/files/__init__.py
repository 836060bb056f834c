"""Files of the store: directories, memory-mapped files, and the calls to the operating system."""
