"""Packed NVFP4 decodes to the numbers of the reference: portably, and by the PTX read instruction by instruction."""

import re

import numpy as np
import pytest
import torch

from drafter_kernels.quantize import Nvfp4Weight, dequantize_nvfp4, pack_nvfp4, quantize_nvfp4, unpack_nvfp4

triton = pytest.importorskip("triton")
from drafter_kernels.quantize import kernel  # noqa: E402  # decides between interpreter and compiler when imported

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"float16": triton.language.float16, "bfloat16": triton.language.bfloat16}


def every_scale() -> Nvfp4Weight:
    """All codes beside all positive E4M3 scales, zero and subnormal ones too."""
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).view(127, 1).repeat(1, 3)
    generator = torch.Generator().manual_seed(1)
    codes = torch.stack([torch.randperm(16, generator=generator) for _ in range(127 * 3)]).view(127, 48)
    codes = codes.to(torch.uint8)
    return Nvfp4Weight(codes[:, 0::2] | codes[:, 1::2] << 4, scales, torch.tensor(1.0))


def test_packing_loses_nothing():
    weight = quantize_nvfp4(torch.randn(7, 80, generator=torch.Generator().manual_seed(0)))
    packed = pack_nvfp4(weight)
    assert packed.num_bytes == weight.num_bytes
    assert packed.shape == (7, 80)
    assert torch.equal(unpack_nvfp4(packed).codes, weight.codes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ptx", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_decoded_words_are_the_reference_s_numbers(device, dtype, ptx):
    if ptx and device == "cpu":
        device = "cuda"  # the interpreter has no PTX
    weight, (rows, columns) = every_scale(), (128, 64)
    codes, scales = torch.zeros(rows, columns // 2, dtype=torch.uint8), torch.zeros(rows, columns // 16)
    codes[:127, :24], scales[:127, :3] = weight.codes, weight.block_scales.float()
    padded = Nvfp4Weight(codes, scales.to(torch.float8_e4m3fn), weight.tensor_scale)
    packed = pack_nvfp4(padded)
    out = torch.full((rows, columns), torch.nan, device=device)
    words, block_scales = packed.words.to(device), packed.block_scales.to(device)
    kernel.decode_kernel[(1,)](words, block_scales, out, BN=rows, BK=columns // 8, DTYPE=DTYPES[dtype], PTX=ptx)
    assert torch.equal(out.cpu(), dequantize_nvfp4(padded))


# A reader of the few PTX instructions that the kernels use, so that what they say can be checked without a GPU.

FORMATS = {"f16x2": np.float16, "bf16x2": None}


def lanes(register: int, kind: str) -> np.ndarray:
    halves = np.array([register & 0xFFFF, register >> 16], dtype=np.uint16)
    if kind == "f16x2":
        return halves.view(np.float16).astype(np.float64)
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def register(values: np.ndarray, kind: str) -> int:
    if kind == "f16x2":
        low, high = values.astype(np.float16).view(np.uint16).tolist()
    else:
        low, high = (torch.tensor(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)).tolist()
    return low | high << 16


def run_ptx(  # noqa: C901, PLR0912  # one case an instruction
    text: str, operands: dict[str, int]
) -> dict[str, object]:
    """Executes straight-line PTX over 32-bit registers; returns all of them."""
    found = dict(operands)

    def read(name):
        return int(name, 0) if name[0].isdigit() else found[name]

    for line in re.findall(r"[a-z][^;{}]*(?:\{[^}]*\}[^;]*)?(?=;)", text.split(".reg", 1)[1].split("\n", 1)[1]):
        name, _, rest = line.strip().partition(" ")
        where, *given = [part.strip() for part in rest.split(",")] if "{" not in rest else ["", rest]
        match name.split("."):
            case ["mov", "b32" | "b64" as size] if "{" in rest:
                low, high, source = re.fullmatch(r"\{([\w$]+), ([\w$]+)\}, ([\w$]+)", rest).groups()
                width = int(size[1:]) // 2
                found[low], found[high] = found[source] & (1 << width) - 1, found[source] >> width
            case ["mov", "b32"]:
                found[where] = read(given[0])
            case ["and", "b32"]:
                found[where] = read(given[0]) & read(given[1])
            case ["shl", "b32"]:
                found[where] = read(given[0]) << read(given[1]) & 0xFFFFFFFF
            case ["shr", "u32"]:
                found[where] = read(given[0]) >> read(given[1])
            case ["lop3", "b32"]:
                assert given[3] == "0xEA"
                found[where] = read(given[0]) & read(given[1]) | read(given[2])
            case ["prmt", "b32"]:
                joined = (read(given[0]) | read(given[1]) << 32).to_bytes(8, "little")
                selector = read(given[2])
                found[where] = int.from_bytes(bytes(joined[selector >> 4 * i & 7] for i in range(4)), "little")
            case ["mul", "lo", "u32"]:
                found[where] = read(given[0]) * read(given[1]) & 0xFFFFFFFF
            case ["add", "rn", kind]:
                found[where] = register(lanes(read(given[0]), kind) + lanes(read(given[1]), kind), kind)
            case ["mul", "rn", kind]:
                found[where] = register(lanes(read(given[0]), kind) * lanes(read(given[1]), kind), kind)
            case ["fma", "rn", kind]:
                product = lanes(read(given[0]), kind) * lanes(read(given[1]), kind)
                found[where] = register(product + lanes(read(given[2]), kind), kind)
            case ["cvt", "f32", "f16"]:
                found[where] = float(np.array(read(given[0]), dtype=np.uint16).view(np.float16))
            case ["add", "f32"]:
                found[where] = read(given[0]) + read(given[1])
            case _:
                raise AssertionError(f"not read: {line}")
    return found


@pytest.mark.parametrize(
    ("texts", "kind", "up", "lacks"),
    [
        (kernel._FLOAT16_PAIRS, "f16x2", kernel._FLOAT16_UP, kernel.FLOAT16_LACKS),
        (kernel._BFLOAT16_PAIRS, "bf16x2", kernel._BFLOAT16_UP, kernel.BFLOAT16_LACKS),
    ],
    ids=["float16", "bfloat16"],
)
def test_the_ptx_of_the_decode_says_the_same(texts, kind, up, lacks):
    weight = every_scale()
    words, expected = pack_nvfp4(weight).words, dequantize_nvfp4(weight)
    for row in range(127):
        scale = float(weight.block_scales[row, 0].float())
        scales = register(np.array([scale, scale]) * up.value, kind)
        for word in (0, 2, 4):
            given = {"$1": int(words[row, word]) & 0xFFFFFFFF, "$2": int(words[row, word + 1]) & 0xFFFFFFFF}
            found = [run_ptx(text, {**given, "$3": scales})["$0"] for text in texts.value]
            pairs = np.stack([lanes(pair, kind) for pair in found]) * lacks.value
            columns = expected[row, 8 * word : 8 * word + 16].view(2, 8).T
            assert np.array_equal(pairs, columns.numpy()), (row, word)


def test_the_ptx_of_the_product_says_the_same():
    generator = torch.Generator().manual_seed(2)
    weight = quantize_nvfp4(torch.randn(20, 16, generator=generator) * 3)
    words = pack_nvfp4(weight).words
    ones = Nvfp4Weight(weight.codes, torch.ones(20, 1).to(torch.float8_e4m3fn), torch.tensor(1.0))
    values = dequantize_nvfp4(ones)
    x = (torch.randn(20, 16, generator=generator) * 2000).half()
    for row in range(20):
        for word in range(2):
            part = x[row, 8 * word : 8 * word + 8].numpy().astype(np.float64)
            pairs = {f"${2 + i}": register(part[2 * i : 2 * i + 2], "f16x2") for i in range(4)}
            found = run_ptx(kernel._DOT8.value, {"$1": int(words[row, word]) & 0xFFFFFFFF, **pairs})
            exact = float(values[row, 8 * word : 8 * word + 8].double() @ torch.from_numpy(part))
            size = float(values[row, 8 * word : 8 * word + 8].double().abs() @ torch.from_numpy(np.abs(part)))
            # Three roundings of at most half a float16's step of a partial sum in each of two lanes.
            assert abs(found["$0"] * kernel.DOT8_LACKS.value - exact) <= 4 * 2**-11 * size


def test_the_ptx_of_neighbours_says_the_same():
    weight = every_scale()
    words, expected = pack_nvfp4(weight).words, dequantize_nvfp4(weight)
    for row in range(127):
        scale = float(weight.block_scales[row, 0].float()) * kernel.FLOAT16_UP.value
        given = {"$3": register(np.array([scale, scale]), "f16x2")}
        for word in range(6):
            given["$2"] = int(words[row, word]) & 0xFFFFFFFF
            found = [run_ptx(text, given) for text in kernel.FLOAT16_NEIGHBOURS.value]
            halves = np.array([pair[name] for pair in found for name in ("$0", "$1")], dtype=np.uint16)
            values = halves.view(np.float16).astype(np.float64) * kernel.FLOAT16_LACKS.value
            assert np.array_equal(values, expected[row, 8 * word : 8 * word + 8].numpy()), (row, word)


def test_the_ptx_of_a_block_s_product_says_the_same():
    generator = torch.Generator().manual_seed(2)
    weight = quantize_nvfp4(torch.randn(20, 16, generator=generator) * 3)
    words = pack_nvfp4(weight).words.numpy().view(np.uint64)
    ones = Nvfp4Weight(weight.codes, torch.ones(20, 1).to(torch.float8_e4m3fn), torch.tensor(1.0))
    values = dequantize_nvfp4(ones).double()
    x = (torch.randn(20, 16, generator=generator) * 2000).half()
    for row in range(20):
        part = x[row].numpy().astype(np.float64).reshape(2, 4, 2)
        pairs = {f"${2 + i}": register(part[0, i], "f16x2") | register(part[1, i], "f16x2") << 32 for i in range(4)}
        found = run_ptx(kernel.DOT16.value, {"$1": int(words[row, 0]), **pairs})
        exact = float(values[row] @ x[row].double())
        size = float(values[row].abs() @ x[row].double().abs())
        # In each of two lanes four roundings by at most half a step of a partial sum, and one of both words.
        assert abs(found["$0"] * kernel.DOT8_LACKS.value - exact) <= 5 * 2**-11 * size
