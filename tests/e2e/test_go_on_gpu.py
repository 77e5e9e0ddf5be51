"""The Go client on a GPU: the tests of clients/go/cuda that need one, against a service with the trained head."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from drafter_service.config import MIB, ServiceConfig
from drafter_service.server.process import ServiceProcess
from on_gpu import DRAFTER_DEVICE
from specdraft import Client, ClientGpu
from specdraft.memory.cuda import format_uuid

pytestmark = pytest.mark.gpu

REPOSITORY = Path(__file__).parents[2]
MODELS = REPOSITORY / "drafter_service" / "demo" / "models"
GO_CLIENT = REPOSITORY / "clients" / "go"
BINARY_VARIABLE = "SPECDRAFT_GO_CUDA_TEST"
"""Names a binary made by `go test -c`, where there is no Go."""

NUM_PROMPT, NUM_DRAFTS = 40, 3


def python_drafts(target, gpu):
    """What `draftsOf` in gpu_test.go asks for, asked from here."""
    with Client(target, memory="cuda", gpu=gpu, slot_count=2, prefill_rows=8) as client:
        numbers = torch.arange(NUM_PROMPT * client.hidden_width, dtype=torch.int64)
        rows = ((numbers * 7919 % 1000).float() / 500 - 1).view(NUM_PROMPT, -1)
        tokens = [index * 37 % 100 for index in range(NUM_PROMPT)]
        drafts = []
        with client.open_sequence() as sequence:
            sequence.prefill(tokens, rows)
            for key in range(NUM_PROMPT - 1, NUM_PROMPT + 9):
                at = key % NUM_PROMPT
                proposal = sequence.propose(key, tokens[at : at + 1], rows[at : at + 1], num_drafts=NUM_DRAFTS)
                drafts += proposal.drafts
        return drafts


def go_binary(folder):
    if BINARY_VARIABLE in os.environ:
        return Path(os.environ[BINARY_VARIABLE]).resolve()
    binary = folder / "cuda.test"
    command = [os.environ.get("GO", "go"), "test", "-c", "-o", str(binary), "./cuda"]
    subprocess.run(command, cwd=GO_CLIENT, env=os.environ | {"CGO_ENABLED": "0"}, check=True)
    return binary


def test_go_gets_the_drafts_that_python_gets(tmp_path):
    gpu = ClientGpu()
    config = ServiceConfig(
        checkpoint=MODELS / "head",
        target_checkpoint=MODELS / "target",
        device=DRAFTER_DEVICE,
        kv_bytes=64 * MIB,
        max_batch=1,
        log_level="warning",
    )
    with ServiceProcess(config) as reached:
        drafts = python_drafts(reached.target, gpu)
        assert len(drafts) == 10 * NUM_DRAFTS
        (tmp_path / "drafts.json").write_text(json.dumps(drafts))
        environment = os.environ | {
            "SPECDRAFT_CUDA_UUID": format_uuid(gpu.uuid),
            "SPECDRAFT_CUDA_TARGET": reached.target,
            "SPECDRAFT_CUDA_DRAFTS": str(tmp_path / "drafts.json"),
        }
        command = [str(go_binary(tmp_path)), "-test.run", "OnAGPU", "-test.v"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("--- PASS") == 2, ended.stdout
