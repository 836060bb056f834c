"""What a server knows: its settings, topics, groups and clients, and the limits of the clients."""
