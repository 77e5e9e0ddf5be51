"""The same cases with the rows in GPU memory: graphs and eager, float32 and bfloat16."""

import tempfile
from pathlib import Path

import pytest
import torch

from checkpoints import write_tiny_checkpoint
from conformance.place import Place
from conformance.reading import in_gpu_memory, load_cases
from conformance.world import World
from on_gpu import DRAFTER_DEVICE
from serving import temporary_directory

CASES = in_gpu_memory(load_cases())
SIMULATED = ("simulated", "graph", "float32")
REAL = [(DRAFTER_DEVICE, runner, dtype) for dtype in ("float32", "bfloat16") for runner in ("graph", "eager")]


@pytest.fixture(
    scope="module", params=[SIMULATED, *(pytest.param(one, marks=pytest.mark.gpu) for one in REAL)], ids="-".join
)
def place(request, tmp_path_factory):
    device, runner, dtype = request.param
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("head"), dtype=dtype)
    matmul = torch.backends.cuda.matmul
    allowed, matmul.allow_tf32 = matmul.allow_tf32, False  # float32 is compared with float32
    settings = {"max_sessions": 64, "runner": runner, "dtype": dtype}
    with tempfile.TemporaryDirectory(prefix="sd-", ignore_cleanup_errors=True) as folder:
        gpu = {"simulated_gpu": folder} if device == "simulated" else {}
        shared = {"simulated_gpu": Path(folder)} if gpu else {"device": device}
        made = Place(checkpoint, settings | shared, gpu={"memory": "cuda"} | gpu)
        assert made.server.service.assembly.head.dtype == getattr(torch, dtype)
        yield made
        made.close()
    matmul.allow_tf32 = allowed


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(case, start_driver, place):
    with temporary_directory() as directory:
        world = World(start_driver("python"), place, directory, is_proxied=case.get("proxy", False))
        try:
            for step in case["steps"]:
                world.run(step, {})
            world.check_comparisons()
        finally:
            world.close()


def test_the_cases_have_their_rows_there(place, start_driver):
    with temporary_directory() as directory:
        world = World(start_driver("python"), place, directory)
        world.run({"open": {}, "expect": {"memory": "cuda"}}, {})
        world.close()
