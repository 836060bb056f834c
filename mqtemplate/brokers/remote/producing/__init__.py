"""Producer of the remote broker: sends, transactions, requests with replies, and recalls."""
