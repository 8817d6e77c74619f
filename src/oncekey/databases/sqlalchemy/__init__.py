"""The application's own SQLAlchemy engines and sessions, for asyncio, for threads and for Flask."""
