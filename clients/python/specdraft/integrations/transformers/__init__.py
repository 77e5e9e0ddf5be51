"""Hugging Face transformers as the target: `model.generate(..., custom_generate=speculative_generate(client))`."""

from specdraft.integrations.transformers.decoding import SpeculativeDecoding, speculative_generate
from specdraft.integrations.transformers.records import DecodeReport, RoundRecord

__all__ = ["DecodeReport", "RoundRecord", "SpeculativeDecoding", "speculative_generate"]
