"""Orders in FastAPI: ``uvicorn examples.fastapi_orders.app:web``."""
