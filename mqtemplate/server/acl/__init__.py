"""Access control: accounts, signatures, and the rights that each request needs."""
