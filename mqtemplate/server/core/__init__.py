"""Sends, ends of transactions, locks and registrations of clients, without connections and commands of a protocol."""
