"""The identity of a head: equal fingerprints mean that carried rows fit and that drafts are equal. No torch.

Rows depend on embedding, norms, joining projection, k and v alone, so rows of a head with another LM head would fit
too. The contract promises more: equal fingerprints draft equally. So an LM head that was rounded or cut counts.
"""

import hashlib
import json
import mmap
from dataclasses import asdict
from typing import Final

from drafter_service.heads.levers import BodyPrecision, LmHeadPrecision
from drafter_service.heads.plan import HeadPlan, PlannedTensor
from drafter_service.heads.safetensors_header import StoredTensor

DIGEST_BYTES: Final = 16
_CHUNK_BYTES: Final = 16 * 2**20
# They change what is accepted or where a tensor was found, never a row or a logit.
_WITHOUT_EFFECT: Final = ("model_type", "max_position", "tie_word_embeddings")


def head_fingerprint(plan: HeadPlan) -> str:
    """Hex BLAKE2b over what is computed (record, sizes, dtype, precisions) and every byte of every tensor used.

    The plan's LM head precision is resolved; as stored and uncut, it adds nothing.

    Reads the tensors' bytes from their files: seconds for a head with large vocabulary tables.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    config = {key: value for key, value in asdict(plan.config).items() if key not in _WITHOUT_EFFECT}
    record = plan.record
    computed = (record.concat, record.norm, record.attention, record.ffn, record.rope_position_offset)
    digest.update(json.dumps([config, computed], sort_keys=True).encode())
    if plan.lm_head is not LmHeadPrecision.AS_STORED or plan.draft_vocab is not None:
        ids = None if plan.draft_vocab is None else plan.draft_vocab.ids
        digest.update(json.dumps([plan.lm_head, ids]).encode())
    if plan.quantization is not BodyPrecision.AS_STORED:
        digest.update(json.dumps(["quantization", plan.quantization]).encode())
    for tensor in plan.tensors:
        for stored in tensor.files:
            _add(digest, tensor, stored)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, tensor: PlannedTensor, stored: StoredTensor) -> None:
    """Every byte that is read of one of a weight's stored tensors."""
    part = [stored.name.rpartition(".")[2]] if tensor.is_narrow else []
    digest.update(json.dumps([tensor.role, tensor.layer, stored.dtype, tensor.shape, *part]).encode())
    # Rows beyond the vocabulary are not part of the head.
    is_whole = tensor.is_narrow or not stored.shape
    used_bytes = stored.num_bytes if is_whole else stored.num_bytes // stored.shape[0] * tensor.shape[0]
    with stored.file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for begin in range(stored.begin, stored.begin + used_bytes, _CHUNK_BYTES):
            digest.update(mapped[begin : min(begin + _CHUNK_BYTES, stored.begin + used_bytes)])
