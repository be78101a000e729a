"""vLLM's home of what is `quire.params` here."""

from quire.beams import BeamSearchParams
from quire.params import OutputKind as RequestOutputKind
from quire.params import SamplingParams
from quire.refusals import refused_class
from quire.structured import StructuredOutputsParams

GuidedDecodingParams = refused_class("GuidedDecodingParams")

__all__ = ["BeamSearchParams", "GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
