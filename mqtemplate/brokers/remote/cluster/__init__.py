"""One client of a cluster: settings, routes, connections, requests, and the errors of their responses."""
