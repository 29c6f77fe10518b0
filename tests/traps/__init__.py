"""One test or more per measured trap of trio, trio-asyncio and asyncpg, against a real server and real time."""
