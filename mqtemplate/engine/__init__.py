"""The broker itself, without sockets: it stores, reads and delays messages, and keeps groups and transactions."""
