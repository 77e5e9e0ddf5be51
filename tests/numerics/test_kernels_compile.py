"""Every kernel compiles for Hopper at the sizes of a real head, and none is compiled again for a live number of rows.

No GPU takes part: Triton and the assembler that it brings compile, and nothing is launched.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT

pytest.importorskip("triton")

# Run in a process of its own: in this one kernels are interpreted.
SCRIPT = r"""
import json, re, sys
sys.path[:0] = ["kernels", "kernels/bench"]
import torch
from cases import Bench, absorb_cases, attention_cases, linear_cases, lm_head_cases, row_cases
from drafter_kernels import CompileWatch
from heads import DENSE, Weights
from hopper import compiling_for_hopper, examine
from projected_cases import projected_cases

bench = Bench(DENSE, Weights(torch.device("cpu"), empty=True), True)
compiled, kernels = [], {}
groups = {
    "lm_head": lambda batches: lm_head_cases(bench, batches),
    "linear": lambda batches: linear_cases(bench, batches),
    "rows": lambda batches: row_cases(bench, batches),
    "attention": lambda batches: attention_cases(bench, [(batch, 300) for batch in batches]),
    "projected": lambda batches: projected_cases(bench, [(batch, 300) for batch in batches]),
    "absorb": lambda batches: absorb_cases(bench, batches),
}
later = {}
with compiling_for_hopper() as launched, CompileWatch(compiled.append):
    for name, make in groups.items():
        # One row, and the LM head's buckets of 8 and of 16.
        for case in [*make([4, 9] if name == "lm_head" else [4]), *make([1])]:
            case.calls[0]()
            for portable in case.candidates.get("portable", ()):
                portable()
        count = len(compiled)
        for case in make([4] if name in {"attention", "projected"} else [1, 2, 3, 13, 16]):
            case.calls[0]()
        later[name] = compiled[count:]
    for case in lm_head_cases(bench, [32, 64]):
        case.calls[0]()
    for kernel in launched:
        kernels.setdefault(id(kernel), kernel)
found = [examine(kernel) for kernel in kernels.values()]
print(json.dumps({
    "later": later,
    "first": len(compiled),
    "kernels": [
        {
            "name": each.name,
            "stack": each.stack_bytes,
            "hgmma": "HGMMA" in each.sass,
            "stores_of_halves": each.sass.count("STS.U16"),
            "asynchronous": "LDGSTS" in each.sass or "UTMALDG" in each.sass,
            "in_boxes": "UTMALDG" in each.sass,
            "barriers": each.sass.count("BAR.SYNC"),
            "barriers_among_products": each.sass.partition("HGMMA")[2].rpartition("HGMMA")[0].count("BAR.SYNC"),
            "permutations": each.ptx.count("prmt.b32"),
            "wide_loads_first": len(re.findall(r"LDG\.E\S*\.128", each.sass.split("BAR.SYNC")[0])),
        }
        for each in found
    ],
}))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def of(report, *names):
    return [kernel for kernel in report["kernels"] if kernel["name"] in names]


def test_all_kernels_were_compiled_and_none_spills_registers(report):
    expected = {
        "rms_norm_kernel",
        "nvfp4_kernel",
        "stream_kernel",
        "vector_kernel",
        "nvfp4_row_kernel",
        "dense_kernel",
        "dense_row_kernel",
        "nvfp4_wave_kernel",
        "dense_wave_kernel",
        "reduce_kernel",
        "fuse_pair_kernel",
        "qk_rope_write_kernel",
        "attention_kernel",
    }
    assert {kernel["name"] for kernel in report["kernels"]} >= expected
    assert not [kernel for kernel in report["kernels"] if kernel["stack"]]


def test_products_run_on_the_tensor_cores_of_hopper_fed_by_asynchronous_copies(report):
    products = of(report, "nvfp4_kernel", "stream_kernel", "dense_kernel")
    assert len(products) >= 10
    assert all(kernel["hgmma"] and kernel["asynchronous"] for kernel in products)


def test_decoded_weights_go_from_registers_to_the_tensor_core(report):
    """A detour through shared memory would take 128 stores of 16 bits; masks take a few."""
    portable, hoppers = of(report, "nvfp4_kernel"), of(report, "stream_kernel")
    assert all(kernel["permutations"] >= 8 for kernel in portable)
    assert not [kernel for kernel in portable + hoppers if kernel["stores_of_halves"] > 16]


def test_hopper_s_kernels_wait_once_a_step(report):
    """Triton guesses at barriers where buffers share an allocation: it put 17 into the kernel then, and puts 13 now.

    Two steps are written out. Copies in boxes take a barrier more a step: Triton puts one before each wait for them.
    """
    streams = of(report, "stream_kernel")
    in_boxes = [kernel for kernel in streams if kernel["in_boxes"]]
    others = [kernel for kernel in streams if not kernel["in_boxes"]]
    assert len(others) >= 6
    assert not [kernel for kernel in others if kernel["barriers"] > 14 or kernel["barriers_among_products"] != 1]
    assert len(in_boxes) >= 2
    assert not [kernel for kernel in in_boxes if kernel["barriers"] > 17 or kernel["barriers_among_products"] != 2]


def test_one_row_is_read_16_bytes_a_thread_and_asked_for_before_x_is_waited_for(report):
    """Two loads for x and four or more for rows of the weight come before the first barrier, behind which x is used."""
    waves = of(report, "nvfp4_wave_kernel", "dense_wave_kernel")
    assert len(waves) >= 10
    assert not [kernel for kernel in waves if kernel["barriers"] > 4]
    assert all(kernel["wide_loads_first"] >= 6 for kernel in waves)


def test_no_live_number_of_rows_is_compiled_for(report):
    assert report["first"] >= 20  # so that what is counted later can be seen
    assert report["later"] == {name: [] for name in report["later"]}
    assert set(report["later"]) == {"lm_head", "linear", "rows", "attention", "projected", "absorb"}


def test_without_triton_the_package_is_imported_and_the_references_run():
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, drafter_kernels.absorb, drafter_kernels.paged_attention, drafter_kernels.lm_head as lm\n"
        "ids, logprobs = torch.zeros(2, dtype=torch.int64), torch.zeros(2)\n"
        "lm.lm_head(torch.ones(2, 16), torch.ones(5, 16), ids, logprobs)\n"
        "assert ids.tolist() == [0, 0]\n"
    )
    path = os.pathsep.join([str(Path("kernels")), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
