"""Faults that people reported of services like this one: which tests keep each out of ours, and what waits for what.

Titles are the reporters' faults in a few words; the sources are where they told them.
"""

import ast
import re
from dataclasses import dataclass, field

import pytest

from repository import files, tree

NUM_CASES = 23
REASONS = ("GPU", "Go", "Kubernetes", "head kind", "other processes' carries")
FAULTS = "e2e/test_reported_faults.py"
RETRIES = "e2e/test_server_retries.py"
HEALTH = "e2e/test_server_health.py"
CALLS = "e2e/test_server_call_refusals.py"
ORACLE = "numerics/test_engine_against_oracle.py"
CHECKPOINT = "unit/test_checkpoint.py"
CONFIG = "unit/test_head_config.py"


@dataclass(frozen=True)
class Case:
    """One reported fault.

    Attributes:
        source: where it was told.
        tests: file (below tests/) and name of each test that holds it.
        missing: what of it cannot be reached yet, by what it waits for.
    """

    source: str
    tests: tuple[tuple[str, str], ...] = ()
    missing: dict[str, str] = field(default_factory=dict)


CASES = {
    "Context restored from a prefix cache never reached the drafter": Case(
        "https://github.com/vllm-project/vllm/issues/47930",
        (
            (FAULTS, "test_a_context_restored_without_its_pairs_is_refused_or_declared_and_can_be_filled_later"),
            (ORACLE, "test_a_declared_gap_drafts_like_an_oracle_over_the_rows_present"),
        ),
    ),
    "Placeholder or out-of-range token id reaches the embedding lookup": Case(
        "https://github.com/vllm-project/vllm/pull/40768",
        (
            (FAULTS, "test_a_token_id_that_is_none_is_named_and_nobody_else_waits"),
            ("e2e/test_server_entry_refusals.py", "test_a_wrong_entry_is_refused_by_name_and_nothing_else_happens"),
        ),
        {"Go": "its client sending uint32 4294967295"},
    ),
    "Rows added to pad a CUDA graph write into live KV": Case(
        "https://github.com/vllm-project/vllm/issues/43810",
        (
            (FAULTS, "test_a_batch_with_a_row_less_than_before_writes_into_nobodys_last_page"),
            (ORACLE, "test_a_neighbours_full_last_page_is_never_touched"),
        ),
        {"GPU": "the graph runner"},
    ),
    "A retried Catchup is applied twice": Case(
        "https://github.com/googleapis/google-cloud-ruby/pull/1572",
        (
            (FAULTS, "test_a_catchup_delivered_twice_is_done_once_and_one_that_does_not_follow_says_where_it_stands"),
            (RETRIES, "test_an_overlap_rewinds_and_a_retried_catchup_is_not_applied_twice"),
            (RETRIES, "test_a_call_whose_client_left_is_done_and_its_retry_learns_it"),
        ),
    ),
    "Two live requests share one caller-chosen id": Case(
        "https://github.com/vllm-project/vllm/issues/10583",
        ((FAULTS, "test_two_clients_may_choose_one_id_and_a_late_close_never_hits_its_next_owner"),),
    ),
    "Health still says ready after a sticky CUDA fault": Case(
        "https://github.com/triton-inference-server/server/issues/3627",
        (
            (HEALTH, "test_an_engine_that_died_is_not_serving"),
            ("e2e/test_client_real_service.py", "test_a_restart_is_survived"),
        ),
        {"GPU": "a kernel that traps, and the process's exit", "Go": "its client after a restart"},
    ),
    "Shared prefix pages are not a function of the prefix alone": Case(
        "https://github.com/vllm-project/vllm/pull/42971",
        (
            (FAULTS, "test_a_shared_prefix_is_nobodys_to_write_and_each_continues_with_its_own_token"),
            ("numerics/test_shared_pages.py", "test_drafting_never_writes_a_shared_page"),
            ("numerics/test_shared_pages.py", "test_each_of_two_that_share_a_prefix_drafts_like_its_own_oracle"),
        ),
    ),
    "Rows written while drafting are never replaced by true ones": Case(
        "https://github.com/vllm-project/vllm/issues/14649",
        (
            (FAULTS, "test_rows_written_while_drafting_are_replaced_by_true_ones"),
            (ORACLE, "test_every_accept_count_keeps_every_row_exact"),
        ),
        {"head kind": "later layers of heads with several layers"},
    ),
    "One exported allocation opened more than once": Case(
        "https://github.com/openucx/ucx/issues/3192", missing={"GPU": "CUDA IPC regions"}
    ),
    "Device named by the sender's ordinal": Case(
        "https://github.com/kvcache-ai/Mooncake/pull/3678", missing={"GPU": "devices named by UUID"}
    ),
    "Keepalive pings of the Go client anger the Python server": Case(
        "https://github.com/llm-d/llm-d-kv-cache/issues/359",
        ((FAULTS, "test_the_shipped_client_never_pings_more_often_than_the_service_allows"),),
        {"Go": "its client, idle for two minutes"},
    ),
    "Memory budget guessed from a GPU that others use too": Case(
        "https://github.com/vllm-project/vllm/issues/56830",
        (
            (FAULTS, "test_the_pool_is_a_budget_in_bytes_and_nothing_is_guessed"),
            ("e2e/test_server_process.py", "test_settings_that_cannot_work_are_named_and_leave_nothing"),
        ),
        {"GPU": "a neighbour that allocates and frees meanwhile"},
    ),
    "Padding rows of the output head win the argmax": Case(
        "https://github.com/mirage-project/mirage/issues/751",
        (
            ("numerics/test_mtp_head.py", "test_padding_rows_of_the_output_head_never_win"),
            (CHECKPOINT, "test_rows_beyond_the_vocabulary_are_noted_and_not_loaded"),
        ),
        {"GPU": "the graph runner"},
    ),
    "EAGLE-3 layers counted by another convention, or guessed": Case(
        "https://github.com/sgl-project/sglang/pull/25454",
        (("e2e/test_server_handshake.py", "test_a_client_that_does_not_fit_is_told_what_does_not"),),
        {"head kind": "heads that read several layers of the target"},
    ),
    "Checkpoint promises an MTP head but has no (or not all) tensors": Case(
        "https://github.com/vllm-project/vllm-ascend/pull/15531",
        (
            (CHECKPOINT, "test_a_config_that_promises_a_head_without_its_tensors_is_refused_naming_the_prefix"),
            (CHECKPOINT, "test_tensors_that_the_index_omits_are_used_with_a_note"),
            (CHECKPOINT, "test_an_index_that_names_a_missing_file_is_refused_naming_it"),
            (CHECKPOINT, "test_a_missing_tensor_is_refused_by_name"),
            (CHECKPOINT, "test_a_file_cut_short_is_refused_by_name"),
            (CHECKPOINT, "test_an_unknown_extra_head_tensor_is_refused_by_name"),
            (CHECKPOINT, "test_a_bad_checkpoint_is_refused_before_torch_starts"),
        ),
    ),
    "Session lives on one replica, the call lands on another": Case(
        "https://github.com/vllm-project/semantic-router/issues/2417",
        (
            (FAULTS, "test_a_call_that_reaches_another_replica_is_told_that_its_session_is_unknown_there"),
            (FAULTS, "test_shared_memory_is_refused_to_a_client_of_another_host"),
            ("e2e/test_server_process.py", "test_a_killed_server_is_replaced_and_its_sessions_are_unknown"),
            ("unit/test_client_sessions.py", "test_after_a_restart_the_next_sequence_opens_a_new_session"),
        ),
        {"Kubernetes": "the Service of the chart", "Go": "its client"},
    ),
    "Pod wiring in which CUDA IPC cannot work": Case(
        "https://github.com/LMCache/LMCache/issues/4534",
        (("e2e/test_server_handshake.py", "test_over_tcp_there_is_inline_memory_only"),),
        {"GPU": "the probe of a mapping", "Kubernetes": "the grants and mounts of the chart"},
    ),
    "Health calls wait behind work": Case(
        "https://github.com/grpc/grpc/pull/17747",
        (
            (HEALTH, "test_probes_are_answered_while_watchers_and_held_calls_take_every_other_thread"),
            (HEALTH, "test_one_more_proposal_of_a_busy_sequence_is_refused_at_once_while_workers_are_held"),
            (HEALTH, "test_probes_are_answered_while_the_largest_message_is_read"),
        ),
    ),
    "KV hand-over matched by order instead of by identity": Case(
        "https://github.com/sgl-project/sglang/pull/33767",
        (
            (FAULTS, "test_a_carry_brings_every_row_bit_for_bit_and_nothing_after_them"),
            (CALLS, "test_a_carry_of_another_head_is_refused_and_stays"),
        ),
        {"other processes' carries": "importers whose layout differs"},
    ),
    "Kernels compile on live requests": Case(
        "https://github.com/vllm-project/vllm/issues/49349",
        (
            ("e2e/test_server_handshake.py", "test_what_comes_before_the_head_is_loaded_is_told_to_wait"),
            ("e2e/test_warm_service.py", "test_the_shapes_that_others_compiled_for_are_ready"),
            ("numerics/test_round_compiles.py", "test_nothing_is_compiled_or_captured_once_warm"),
        ),
    ),
    "A config value lives one level deeper: silent default": Case(
        "https://github.com/vllm-project/vllm/issues/55322",
        (
            (CONFIG, "test_a_number_of_layers_only_in_text_config_is_the_one_that_counts"),
            (CONFIG, "test_levels_that_disagree_resolve_to_the_nested_one_with_a_note"),
            (CONFIG, "test_a_wrappers_rope_section_never_outranks_the_text_configs_own_value"),
            (CONFIG, "test_an_absent_rope_base_is_refused_rather_than_guessed"),
            (CONFIG, "test_an_unknown_or_impossible_rope_setting_is_refused_by_name"),
            (CHECKPOINT, "test_a_stored_lm_head_wins_over_a_tie_flag"),
        ),
    ),
    "Quantised checkpoint whose MTP part is not (or differently) quantised": Case(
        "https://github.com/vllm-project/vllm/issues/44087",
        (
            (CHECKPOINT, "test_a_quantised_target_whose_head_is_not_quantised_loads_as_stored"),
            (CHECKPOINT, "test_a_stored_type_that_is_not_supported_is_refused_by_tensor"),
            ("numerics/test_narrow_checkpoints.py", "test_a_narrow_checkpoint_drafts_as_what_its_numbers_mean"),
            (
                "numerics/test_narrow_checkpoints.py",
                "test_scales_that_are_missing_unknown_or_wrong_are_refused_by_name",
            ),
        ),
    ),
    "Message above gRPC's default limit": Case(
        "https://github.com/grpc/grpc.io/issues/1254",
        (
            (CALLS, "test_a_message_one_byte_too_large_is_refused_by_grpc_and_the_largest_is_not"),
            ("unit/test_client_sequences.py", "test_inline_chunks_fit_the_message_limit"),
            ("e2e/test_client_real_service.py", "test_a_long_prompt_gives_the_drafts_of_small_steps"),
        ),
        {"Go": "its client"},
    ),
}


def test_the_list_is_whole_and_names_each_source_once():
    assert len(CASES) == NUM_CASES
    sources = [case.source for case in CASES.values()]
    assert len(set(sources)) == NUM_CASES
    assert all(re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", source) for source in sources)


@pytest.mark.parametrize("title", CASES)
def test_every_case_is_held_by_tests_that_exist_or_waits_for_something_named(title):
    case = CASES[title]
    assert case.tests or case.missing
    assert set(case.missing) <= set(REASONS)
    for path, name in case.tests:
        assert f"tests/{path}" in files(), path
        names = {node.name for node in ast.walk(tree(f"tests/{path}")) if isinstance(node, ast.FunctionDef)}
        assert name in names, f"{path} has no {name}"


def test_every_test_of_a_reported_fault_stands_in_the_list():
    listed = {name for case in CASES.values() for path, name in case.tests if path == FAULTS}
    nodes = ast.walk(tree(f"tests/{FAULTS}"))
    assert {n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")} == listed
