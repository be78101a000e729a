"""vLLM's home of what is `quire.params` here."""

from quire.params import OutputKind as RequestOutputKind
from quire.params import SamplingParams
from quire.refusals import refused_class

BeamSearchParams = refused_class("BeamSearchParams")
GuidedDecodingParams = refused_class("GuidedDecodingParams")
StructuredOutputsParams = refused_class("StructuredOutputsParams")

__all__ = ["BeamSearchParams", "GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
