"""Engines that draft through specdraft. Each module imports its engine when it is imported, and not before."""

__all__: list[str] = []
