"""Random rounds of some sequences, told to books one after the other."""

from __future__ import annotations

import random

import torch

from books import write


class Story:
    """Random rounds of some sequences, told to books one after the other."""

    def __init__(self, books, seed, num_sequences=6):
        self.books = books
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.ids = [books.open() for _ in range(num_sequences)]
        self.ops = dict.fromkeys(self.ids, 0)
        self.pairs = {sequence: {} for sequence in self.ids}
        self.drafts = dict.fromkeys(self.ids, ())

    def entry(self, sequence, most_pairs=5):
        pairs = self.pairs[sequence]
        next_key = max(pairs, default=-1) + 1
        first_key = self.random.randint(max(next_key - 3, 0), next_key)
        tokens = [self.random.randrange(128) for _ in range(self.random.randint(1, most_pairs))]
        hiddens = torch.randn(len(tokens), self.books.head.config.hidden_size, generator=self.generator)
        self.pairs[sequence] = {key: pair for key, pair in pairs.items() if key < first_key}
        self.pairs[sequence] |= {first_key + i: (token, hiddens[i]) for i, token in enumerate(tokens)}
        self.ops[sequence] += 1
        return write(sequence, self.ops[sequence], first_key, tokens, hiddens, self.random.randint(0, 4))

    def round(self):
        chosen = self.random.sample(self.ids, self.random.randint(1, len(self.ids)))
        entries = [self.entry(sequence) for sequence in chosen]
        return chosen, entries, self.books.ask(*entries)
