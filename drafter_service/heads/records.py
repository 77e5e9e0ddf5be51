"""The table of families. Sources: public checkpoints' configs and tensor lists, transformers' model code."""

from typing import Final

from drafter_service.heads.record import (
    ArchitectureRecord,
    AttentionKind,
    ConcatOrder,
    Dimension,
    FfnKind,
    FixedValue,
    HiddenSource,
    NormKind,
    RecycleSource,
    TensorRole,
)

QWEN3_5: Final = ArchitectureRecord(
    family="qwen3_5",
    model_types=("qwen3_5_text", "qwen3_5"),
    tensor_prefix="mtp.",
    tensors=(
        TensorRole("join_proj", "mtp.fc.weight", (Dimension.HIDDEN, Dimension.JOINED)),
        TensorRole("embedding_norm", "mtp.pre_fc_norm_embedding.weight", (Dimension.HIDDEN,)),
        TensorRole("hidden_norm", "mtp.pre_fc_norm_hidden.weight", (Dimension.HIDDEN,)),
        TensorRole("final_norm", "mtp.norm.weight", (Dimension.HIDDEN,)),
    ),
    layer_tensors=(
        TensorRole("input_norm", "mtp.layers.{layer}.input_layernorm.weight", (Dimension.HIDDEN,)),
        TensorRole("ffn_norm", "mtp.layers.{layer}.post_attention_layernorm.weight", (Dimension.HIDDEN,)),
        TensorRole(
            "q_proj", "mtp.layers.{layer}.self_attn.q_proj.weight", (Dimension.QUERY_AND_GATE, Dimension.HIDDEN)
        ),
        TensorRole("k_proj", "mtp.layers.{layer}.self_attn.k_proj.weight", (Dimension.KEY_VALUE, Dimension.HIDDEN)),
        TensorRole("v_proj", "mtp.layers.{layer}.self_attn.v_proj.weight", (Dimension.KEY_VALUE, Dimension.HIDDEN)),
        TensorRole("o_proj", "mtp.layers.{layer}.self_attn.o_proj.weight", (Dimension.HIDDEN, Dimension.QUERY)),
        TensorRole("q_norm", "mtp.layers.{layer}.self_attn.q_norm.weight", (Dimension.HEAD,)),
        TensorRole("k_norm", "mtp.layers.{layer}.self_attn.k_norm.weight", (Dimension.HEAD,)),
        TensorRole("gate_proj", "mtp.layers.{layer}.mlp.gate_proj.weight", (Dimension.INTERMEDIATE, Dimension.HIDDEN)),
        TensorRole("up_proj", "mtp.layers.{layer}.mlp.up_proj.weight", (Dimension.INTERMEDIATE, Dimension.HIDDEN)),
        TensorRole("down_proj", "mtp.layers.{layer}.mlp.down_proj.weight", (Dimension.HIDDEN, Dimension.INTERMEDIATE)),
    ),
    # The plain text model first, then the multimodal wrapper.
    embedding_names=("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
    lm_head_names=("lm_head.weight",),
    concat=ConcatOrder.EMBEDDING_HIDDEN,
    norm=NormKind.ONE_PLUS_WEIGHT,
    hidden_source=HiddenSource.POST_NORM,
    recycle=RecycleSource.POST_NORM,
    attention=AttentionKind.GATED_GQA,
    ffn=FfnKind.DENSE_SWIGLU,
    rope_position_offset=0,
    layer_count_keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    # Only what the family's published configs leave out. Sizes and the RoPE base have no default:
    # a wrong guess loads and merely drafts badly.
    defaults=(
        ("head_dim", 256),
        ("rms_norm_eps", 1e-6),
        ("partial_rotary_factor", 0.25),
        ("max_position_embeddings", 32768),
        ("tie_word_embeddings", False),
    ),
    fixed_values=(
        FixedValue("hidden_act", ("silu",)),
        FixedValue("attention_bias", (False,)),
        FixedValue("mlp_bias", (False,)),
        FixedValue("attn_output_gate", (True,)),
        # Published configs say "swish" and mean the linear-attention layers; the softmax layers' gate is a sigmoid.
        FixedValue("output_gate_type", ("swish", "sigmoid")),
        FixedValue("mtp_use_dedicated_embeddings", (False,)),
        FixedValue("use_sliding_window", (False,)),
        FixedValue("num_experts", (0,)),
        FixedValue("attn_logit_softcapping", (None,)),
        FixedValue("final_logit_softcapping", (None,)),
        FixedValue("logit_scale", (None, 1)),
    ),
)

RECORDS: Final = (QWEN3_5,)

# Known families whose record is still to be written: refused by name, which tells a user more than "unknown".
PLANNED_MODEL_TYPES: Final = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")


def record_for(model_type: str) -> ArchitectureRecord | None:
    """The record of a config's model_type, or None."""
    return next((record for record in RECORDS if model_type in record.model_types), None)


def known_model_types() -> tuple[str, ...]:
    """Every model_type that has a record."""
    return tuple(model_type for record in RECORDS for model_type in record.model_types)
