"""`AsyncClient` in tests that are no tasks themselves."""

import asyncio

from specdraft import AsyncClient


def in_client(service, scenario, **options):
    """What `scenario` returns, given a client of the service in a loop of its own."""

    async def main():
        async with AsyncClient(service.target, **options) as client:
            return await scenario(client)

    return asyncio.run(main())
