"""The thread that waits for the sockets of a server or of a client."""
