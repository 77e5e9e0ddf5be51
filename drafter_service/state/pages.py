"""The page allocator: who may use which page of the KV pool. Pure; the memory itself is in `pool`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class PagesExhausted(Exception):
    """Fewer pages are free than were asked for; nothing was taken.

    Attributes:
        num_needed: pages asked for.
        num_free: pages free.
    """

    def __init__(self, num_needed: int, num_free: int) -> None:
        super().__init__(f"{num_needed} pages needed, {num_free} free")
        self.num_needed = num_needed
        self.num_free = num_free


class PageAllocator:
    """Hands out page indices and counts who holds them.

    A page has as many holders as `allocate` and `retain` gave it, and is free again when each has released it. Only
    the engine thread calls this, and only after the device has finished with the pages that it releases.

    Attributes:
        num_shared: pages with several holders.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self.num_shared = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, one holder each. Raises PagesExhausted and takes none if there are fewer."""
        if count > len(self._free):
            raise PagesExhausted(count, len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Adds one holder to each page, all of which must be held already."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] += 1
            self.num_shared += self._holders[page] == 2

    def release(self, pages: Iterable[int]) -> None:
        """Takes one holder from each page; those without any are free."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free already"
            self._holders[page] -= 1
            self.num_shared -= self._holders[page] == 1
            if self._holders[page] == 0:
                self._free.append(page)

    def is_shared(self, page: int, num_leaving: int = 0) -> bool:
        """Whether a page has several holders, so that none of them may write it; num_leaving of them do not count."""
        return self._holders[page] - num_leaving > 1

    def num_freed(self, releases: Mapping[int, int]) -> int:
        """How many pages would be free if each lost as many holders as `releases` says."""
        return sum(self._holders[page] == count for page, count in releases.items())

    def free_pages(self) -> tuple[int, ...]:
        """The free pages, for tests that poison them."""
        return tuple(self._free)
