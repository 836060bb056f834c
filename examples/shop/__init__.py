"""A web shop as in Spring: FastAPI, SQLAlchemy, and messages for everything that happens later or elsewhere."""
