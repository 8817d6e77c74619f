"""PostgreSQL, through asyncpg and through psycopg: sessions, pools, transactions, and the meaning of its errors."""
