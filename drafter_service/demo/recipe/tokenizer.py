"""A byte-level BPE tokenizer of the corpus, and the corpus as token ids."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .corpus import Corpus, Document
from .shapes import END_OF_TEXT

__all__ = ["encode_corpus", "load_tokenizer", "load_tokens", "save_tokenizer", "train_tokenizer"]


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Learn `vocab_size` entries, the 256 bytes and the end-of-text token (id 0) included, from training text only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in corpus.training), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json so that AutoTokenizer loads them."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json as written above."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_corpus(tokenizer: Tokenizer, corpus: Corpus, path: Path) -> dict[str, int]:
    """Write `training` and `held_out` as one stream of int16 ids each, an end-of-text token after each file."""
    streams = {
        "training": _encode(tokenizer, corpus.training),
        "held_out": _encode(tokenizer, corpus.held_out),
    }
    save_file(streams, path)
    return {name: stream.numel() for name, stream in streams.items()}


def load_tokens(path: Path, device: str) -> dict[str, torch.Tensor]:
    """The two streams as int64 ids on `device`."""
    return {name: stream.to(device=device, dtype=torch.int64) for name, stream in load_file(path).items()}


def _encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> torch.Tensor:
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    texts = [document.text for document in documents]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = [np.asarray([*encoding.ids, end_id], dtype=np.int16) for encoding in encodings]
    return torch.from_numpy(np.concatenate(ids))
