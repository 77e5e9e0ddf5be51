"""What a sequence costs that nobody is using."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import torch

from books import Books, write
from checkpoints import write_tiny_checkpoint
from drafter_service.heads import load_head

NUM_SEQUENCES = 500
LIMIT_BYTES = 4096


def test_an_idle_sequence_takes_less_than_four_kibibytes_beside_its_pages(tmp_path: Path) -> None:
    """Opened, written to and drafted for, so that its last answer is kept for a retry."""
    write_tiny_checkpoint(tmp_path)
    books = Books(load_head(tmp_path), num_pages=2 * NUM_SEQUENCES + 64, page_rows=4)
    hiddens = torch.zeros(1, books.head.config.hidden_size)

    def use(count: int) -> None:
        for _ in range(count):
            sequence_id = books.open()
            books.submit(write(sequence_id, 1, 0, [1], hiddens, 4)).get(timeout=30)

    books.poison = books.check_pages = lambda: None  # they look at everything, every time
    use(50)
    gc.collect()
    tracemalloc.start()
    use(NUM_SEQUENCES)
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    books.close()
    assert len(books.ledger.sequences) == NUM_SEQUENCES + 50
    assert taken / NUM_SEQUENCES < LIMIT_BYTES
