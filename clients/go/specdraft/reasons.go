package specdraft

import pb "example.com/specdraft/clients/go/specdraft/v1"

// The reasons, by code. error_reason.proto says what each one means and which details come with it.
const (
	// INVALID_ARGUMENT.
	ReasonInvalidField        = Reason(pb.ErrorReason_ERROR_REASON_INVALID_FIELD)
	ReasonDeadlineRequired    = Reason(pb.ErrorReason_ERROR_REASON_DEADLINE_REQUIRED)
	ReasonTokenOutOfRange     = Reason(pb.ErrorReason_ERROR_REASON_TOKEN_OUT_OF_RANGE)
	ReasonPairCountMismatch   = Reason(pb.ErrorReason_ERROR_REASON_PAIR_COUNT_MISMATCH)
	ReasonTooManyPairs        = Reason(pb.ErrorReason_ERROR_REASON_TOO_MANY_PAIRS)
	ReasonTooManyDrafts       = Reason(pb.ErrorReason_ERROR_REASON_TOO_MANY_DRAFTS)
	ReasonBatchTooLarge       = Reason(pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE)
	ReasonDuplicateSequence   = Reason(pb.ErrorReason_ERROR_REASON_DUPLICATE_SEQUENCE)
	ReasonHiddenDTypeMismatch = Reason(pb.ErrorReason_ERROR_REASON_HIDDEN_DTYPE_MISMATCH)
	ReasonHiddenSizeMismatch  = Reason(pb.ErrorReason_ERROR_REASON_HIDDEN_SIZE_MISMATCH)
	ReasonHiddenNotFinite     = Reason(pb.ErrorReason_ERROR_REASON_HIDDEN_NOT_FINITE)
	ReasonMemoryOutOfBounds   = Reason(pb.ErrorReason_ERROR_REASON_MEMORY_OUT_OF_BOUNDS)
	ReasonMaskSizeMismatch    = Reason(pb.ErrorReason_ERROR_REASON_MASK_SIZE_MISMATCH)
	ReasonOpReused            = Reason(pb.ErrorReason_ERROR_REASON_OP_REUSED)

	// FAILED_PRECONDITION.
	ReasonMissingRows           = Reason(pb.ErrorReason_ERROR_REASON_MISSING_ROWS)
	ReasonNeedsLookback         = Reason(pb.ErrorReason_ERROR_REASON_NEEDS_LOOKBACK)
	ReasonHandshakeMismatch     = Reason(pb.ErrorReason_ERROR_REASON_HANDSHAKE_MISMATCH)
	ReasonTransportUnavailable  = Reason(pb.ErrorReason_ERROR_REASON_TRANSPORT_UNAVAILABLE)
	ReasonOtherHost             = Reason(pb.ErrorReason_ERROR_REASON_OTHER_HOST)
	ReasonSamePID               = Reason(pb.ErrorReason_ERROR_REASON_SAME_PID)
	ReasonGPUUUIDNotVisible     = Reason(pb.ErrorReason_ERROR_REASON_GPU_UUID_NOT_VISIBLE)
	ReasonMemoryNotShareable    = Reason(pb.ErrorReason_ERROR_REASON_MEMORY_NOT_SHAREABLE)
	ReasonSequenceNotEmpty      = Reason(pb.ErrorReason_ERROR_REASON_SEQUENCE_NOT_EMPTY)
	ReasonKVMismatch            = Reason(pb.ErrorReason_ERROR_REASON_KV_MISMATCH)
	ReasonMultimodalUnsupported = Reason(pb.ErrorReason_ERROR_REASON_MULTIMODAL_UNSUPPORTED)
	ReasonRowsPolicyUnsupported = Reason(pb.ErrorReason_ERROR_REASON_ROWS_POLICY_UNSUPPORTED)
	ReasonMappingNotProven      = Reason(pb.ErrorReason_ERROR_REASON_MAPPING_NOT_PROVEN)

	// ABORTED.
	ReasonOpOutOfOrder  = Reason(pb.ErrorReason_ERROR_REASON_OP_OUT_OF_ORDER)
	ReasonSessionFenced = Reason(pb.ErrorReason_ERROR_REASON_SESSION_FENCED)
	ReasonDraftMismatch = Reason(pb.ErrorReason_ERROR_REASON_DRAFT_MISMATCH)
	ReasonTicketOrder   = Reason(pb.ErrorReason_ERROR_REASON_TICKET_ORDER)
	ReasonLaneReleased  = Reason(pb.ErrorReason_ERROR_REASON_LANE_RELEASED)

	// NOT_FOUND.
	ReasonSessionUnknown  = Reason(pb.ErrorReason_ERROR_REASON_SESSION_UNKNOWN)
	ReasonSequenceUnknown = Reason(pb.ErrorReason_ERROR_REASON_SEQUENCE_UNKNOWN)
	ReasonCarryUnknown    = Reason(pb.ErrorReason_ERROR_REASON_CARRY_UNKNOWN)
	ReasonRegionUnknown   = Reason(pb.ErrorReason_ERROR_REASON_REGION_UNKNOWN)

	// OUT_OF_RANGE.
	ReasonPositionLimit = Reason(pb.ErrorReason_ERROR_REASON_POSITION_LIMIT)

	// RESOURCE_EXHAUSTED.
	ReasonPagesExhausted     = Reason(pb.ErrorReason_ERROR_REASON_PAGES_EXHAUSTED)
	ReasonSequencesExhausted = Reason(pb.ErrorReason_ERROR_REASON_SEQUENCES_EXHAUSTED)
	ReasonSessionsExhausted  = Reason(pb.ErrorReason_ERROR_REASON_SESSIONS_EXHAUSTED)
	ReasonRegionsExhausted   = Reason(pb.ErrorReason_ERROR_REASON_REGIONS_EXHAUSTED)
	ReasonArenaExhausted     = Reason(pb.ErrorReason_ERROR_REASON_ARENA_EXHAUSTED)
	ReasonInFlightExhausted  = Reason(pb.ErrorReason_ERROR_REASON_IN_FLIGHT_EXHAUSTED)

	// UNAVAILABLE.
	ReasonStarting   = Reason(pb.ErrorReason_ERROR_REASON_STARTING)
	ReasonDraining   = Reason(pb.ErrorReason_ERROR_REASON_DRAINING)
	ReasonDeviceLost = Reason(pb.ErrorReason_ERROR_REASON_DEVICE_LOST)

	// DEADLINE_EXCEEDED.
	ReasonTimeout = Reason(pb.ErrorReason_ERROR_REASON_TIMEOUT)

	// UNIMPLEMENTED.
	ReasonNotImplemented = Reason(pb.ErrorReason_ERROR_REASON_NOT_IMPLEMENTED)

	// INTERNAL.
	ReasonInternal = Reason(pb.ErrorReason_ERROR_REASON_INTERNAL)
)
