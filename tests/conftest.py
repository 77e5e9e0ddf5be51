"""What holds for every test: one thread, reproducible examples, and no skip that goes unseen."""

import logging
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the tests share few cores

import pytest

try:
    import hypothesis
except ImportError:  # the interpreter beside a GPU may lack it; its tests need none of the property tests
    hypothesis = None

IN_CI = os.environ.get("CI") == "true"

if hypothesis is not None:
    hypothesis.settings.register_profile("local", deadline=None)
    # The same examples every time, so that a red CI run means that the commit broke something.
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    hypothesis.settings.load_profile("ci" if IN_CI else "local")


def pytest_configure(config):
    """Without a GPU, or where none is wanted, kernels run in Triton's interpreter. Before its first import."""
    if config.option.markexpr == "not gpu" or (config.option.markexpr != "gpu" and not gpu_visible()):
        os.environ.setdefault("TRITON_INTERPRET", "1")


def gpu_visible() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(config, items):
    """Tests marked `gpu` are deselected where there is none, so that what is skipped is always worth a look."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests or gpu_visible():
        return
    if config.option.markexpr == "gpu":
        raise pytest.UsageError("GPU tests were asked for, and torch sees no GPU")
    config.hook.pytest_deselected(items=gpu_tests)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def fail_if_skipped_in_ci(report):
    if not IN_CI or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: in CI nothing may be skipped ({reason})"


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    outcome = yield
    fail_if_skipped_in_ci(outcome.get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    fail_if_skipped_in_ci(outcome.get_result())


@pytest.fixture(autouse=True)
def the_service_logs_as_before():
    """`serve`, run in this process, sends the service's log elsewhere, and no later test would see it."""
    logger = logging.getLogger("drafter_service")
    propagates, level, handlers = logger.propagate, logger.level, logger.handlers[:]
    yield
    logger.propagate, logger.handlers[:] = propagates, handlers
    logger.setLevel(level)
