"""TakeKV and InstallKV do the same work for few rows and for many."""

import pytest

from drafter_service.engine import HeadIdentity, Ledger
from drafter_service.engine.operations import Install, Open, Take
from drafter_service.engine.vault import CarryLimits, Vault
from drafter_service.state import PageAllocator, Rows

PAGE_ROWS = 16
SESSION = b"session"


class Silent:
    """Nobody listens."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class CountingAllocator(PageAllocator):
    """Counts the pages that pass through its hands."""

    def __init__(self, num_pages):
        super().__init__(num_pages)
        self.num_touched = 0

    def allocate(self, count):
        self.num_touched += count
        return super().allocate(count)

    def retain(self, pages):
        pages = list(pages)
        self.num_touched += len(pages)
        super().retain(pages)

    def release(self, pages):
        pages = list(pages)
        self.num_touched += len(pages)
        super().release(pages)


@pytest.fixture
def ledger():
    allocator = CountingAllocator(20_000)
    vault = Vault(allocator, CarryLimits(ttl_s=1.0, max_pages=20_000), Silent(), lambda: 0.0)
    return Ledger(allocator, HeadIdentity("head", PAGE_ROWS), vault, Silent(), copy_page=Silent().copy_page)


def filled(ledger, name, num_rows):
    ledger.apply(Open(SESSION, name, name, 200_000, reserve=False, max_sequences=10))
    sequence = ledger.sequences.find(SESSION, name)
    sequence.pages.extend(ledger.allocator.allocate(ledger.num_pages_for(num_rows)))
    sequence.rows = Rows().written(0, num_rows)
    return sequence


@pytest.mark.parametrize("num_rows", [1, 100, 100_000])
def test_no_page_changes_hands_and_no_list_of_pages_is_copied(ledger, num_rows):
    source, destination = filled(ledger, b"source", num_rows), filled(ledger, b"destination", 0)
    pages, ledger.allocator.num_touched = source.pages, 0
    taken = ledger.apply(Take(SESSION, b"source", 1, b"a digest", SESSION, ""))
    (carry,) = ledger.vault.carries
    assert carry.pages is pages
    assert len(taken.carry.ranges) == 1
    ledger.apply(Install(SESSION, b"destination", 1, b"a digest", SESSION, taken.carry.kv_id, None, ""))
    assert destination.pages is pages
    assert destination.rows.row_count == num_rows
    assert ledger.allocator.num_touched == 0
