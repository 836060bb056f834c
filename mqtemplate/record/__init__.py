"""One message as bytes: the record of the commit log, its properties, and fast paths for many records at once."""
