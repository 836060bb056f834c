"""Knowledge of a server: its settings, topics, groups and clients, and the limits of the clients."""
