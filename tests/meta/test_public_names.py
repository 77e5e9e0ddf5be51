"""A package has one door: the names in its `__all__`, pinned here so that a change of them is a decision."""

import ast

from repository import packages, tree

# Import name -> public names. A change that removes or renames one is a line in CHANGELOG.md.
PUBLIC_NAMES: dict[str, list[str]] = {
    "drafter_kernels": ["Backend", "CompileWatch"],
    "drafter_kernels.paged_attention": ["paged_attention"],
    "drafter_kernels.quantize": [
        "BLOCK_SIZE",
        "FP8_BLOCK_SIZE",
        "Fp8BlockWeight",
        "Fp8Weight",
        "Nvfp4Weight",
        "PackedNvfp4",
        "dequantize_fp8",
        "dequantize_fp8_blocks",
        "dequantize_nvfp4",
        "nvfp4_tensor_scale",
        "pack_nvfp4",
        "quantize_fp8",
        "quantize_nvfp4",
        "read_stored_weight",
        "unpack_nvfp4",
    ],
    "drafter_service": ["__version__"],
    "drafter_service.bench": [],
    "drafter_service.demo": [],
    "drafter_service.demo.lever_ab": [],
    "drafter_service.demo.recipe": [],
    "drafter_service.engine": ["Engine", "HeadIdentity", "Ledger", "Scheduler", "draining"],
    "drafter_service.heads": [
        "ArchitectureRecord",
        "Checkpoint",
        "CheckpointError",
        "DraftVocabulary",
        "HeadConfig",
        "HeadOutput",
        "HeadPlan",
        "HiddenSource",
        "KvLayout",
        "KvReader",
        "KvWriter",
        "LmHeadPrecision",
        "MtpHead",
        "OracleDraft",
        "PlannedTensor",
        "RecycleSource",
        "ResolvedValue",
        "StoredTensor",
        "as_json",
        "describe",
        "load_head",
        "load_planned_head",
        "oracle_draft",
        "plan_head",
        "read_config",
    ],
    "drafter_service.memory": ["ArenaLayout", "ArenaWish", "DescriptorServer", "HostArena", "SlotOutputs", "lay_out"],
    "drafter_service.server": ["Addresses", "Service", "ask_health"],
    "drafter_service.state": [
        "Advice",
        "Agreement",
        "Carry",
        "CarryTable",
        "KeySpan",
        "PageAllocator",
        "PagesExhausted",
        "Round",
        "Rows",
        "Sequence",
        "SequenceTable",
        "SequenceView",
        "Session",
        "SessionTable",
    ],
    "drafter_service.telemetry": ["Metrics", "set_up_logging"],
    "specdraft": [
        "AbortedError",
        "AsyncClient",
        "AsyncConversations",
        "AsyncSequence",
        "Carry",
        "CatchupItem",
        "Client",
        "Code",
        "Conversations",
        "DType",
        "DeadlineError",
        "FailedPreconditionError",
        "HeadInfo",
        "HiddenRows",
        "HiddenSource",
        "InternalError",
        "InvalidArgumentError",
        "KeyRange",
        "Limits",
        "MemoryKind",
        "NextPairs",
        "NotFoundError",
        "OutOfRangeError",
        "Proposal",
        "ProposeItem",
        "Reason",
        "ResourceExhaustedError",
        "Resumed",
        "RowsPolicy",
        "Sequence",
        "SequenceState",
        "ServerInfo",
        "SessionOptions",
        "SpecdraftError",
        "StopReason",
        "StoredDrafts",
        "TransportError",
        "UnavailableError",
        "UnimplementedError",
        "next_pairs",
    ],
    "specdraft.aio": [],
    "specdraft.integrations": [],
    "specdraft.integrations.transformers": [
        "DecodeReport",
        "RoundRecord",
        "SpeculativeDecoding",
        "speculative_generate",
    ],
    "specdraft.memory": [
        "ArenaLayout",
        "DESCRIPTOR_GRANTED",
        "DESCRIPTOR_SEALS",
        "DESCRIPTOR_TOKEN_SIZE_BYTES",
        "HostArena",
        "NONCE_SIZE_BYTES",
        "SIDE_SOCKET_SUFFIX",
        "SlotLayout",
        "SlotOutputs",
        "SlotPool",
        "StagingRows",
        "check_descriptor",
        "fetch_descriptor",
        "side_socket_path",
    ],
}


def names_in_all(path: str) -> list[str] | None:
    """The value of `__all__`, read without importing; None if there is none."""
    for node in tree(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return ast.literal_eval(node.value)
    return None


def test_every_package_says_what_is_public():
    assert not [name for name, path in packages().items() if names_in_all(path) is None]


def test_public_names_are_the_pinned_ones():
    assert {name: sorted(names_in_all(path) or []) for name, path in packages().items()} == PUBLIC_NAMES
