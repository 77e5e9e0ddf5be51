"""NVFP4 codes in the order in which kernels decode them fastest."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from drafter_kernels.quantize.reference import BLOCK_SIZE, Nvfp4Weight

CODES_PER_WORD: Final = 8

# Of a code: (first bit of its magnitude, bit of its sign) in its half of a word, for the four codes of a half.
_PLACES: Final = ((9, 15), (6, 12), (3, 14), (0, 13))


@dataclass(frozen=True)
class PackedNvfp4:
    """A weight [N, K] as `words` int32 [N, K / 8], `block_scales` E4M3 [N, K / 16], `tensor_scale` float32 [1].

    A word holds the codes of 8 neighbours along K: elements 0, 2, 4, 6 in its low half and 1, 3, 5, 7 in its high
    half, so that what is cut out of both halves at once is a pair of neighbours. In a half the magnitudes of its four
    codes lie in bits 9-11, 6-8, 3-5, 0-2 and their signs in bits 15, 12, 14, 13: the first code needs no shift to
    become a float16, and the second one shift for both parts.
    """

    words: Tensor
    block_scales: Tensor
    tensor_scale: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes stored, as many as unpacked."""
        return self.words.nbytes + self.block_scales.nbytes + self.tensor_scale.nbytes

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.words.shape[0], self.words.shape[1] * CODES_PER_WORD


def pack_nvfp4(weight: Nvfp4Weight) -> PackedNvfp4:
    """The same weight for kernels, on the weight's device; needs 8 bytes of scratch a word of the result."""
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1).flatten(1)
    by_half = codes.view(len(codes), -1, len(_PLACES), 2).long()
    words = torch.zeros(by_half.shape[:2], dtype=torch.int64, device=codes.device)
    for index, (magnitude_bit, sign_bit) in enumerate(_PLACES):
        for half in range(2):
            code = by_half[:, :, index, half]
            words |= ((code & 7) << magnitude_bit | (code >> 3) << sign_bit) << 16 * half
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return PackedNvfp4(signed, weight.block_scales.contiguous(), weight.tensor_scale.reshape(1))


def unpack_nvfp4(packed: PackedNvfp4) -> Nvfp4Weight:
    """What `pack_nvfp4` was given."""
    words = packed.words.long()
    codes = torch.empty((*words.shape, len(_PLACES), 2), dtype=torch.uint8, device=words.device)
    for index, (magnitude_bit, sign_bit) in enumerate(_PLACES):
        for half in range(2):
            bits = words >> 16 * half
            code = (bits >> magnitude_bit & 7) | (bits >> sign_bit & 1) << 3
            codes[:, :, index, half] = code.to(torch.uint8)
    flat = codes.flatten(1)
    assert flat.shape[1] % BLOCK_SIZE == 0
    return Nvfp4Weight(flat[:, 0::2] | flat[:, 1::2] << 4, packed.block_scales, packed.tensor_scale.reshape(()))
