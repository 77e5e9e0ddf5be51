"""The asyncio client; its public names are `specdraft.AsyncClient` and `specdraft.AsyncSequence`."""

__all__: list[str] = []
