"""Work of the requests of clients, in any protocol: without its connections, requests and responses."""
