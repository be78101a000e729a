"""LoRARequest can be imported, as programs do at their top; making one is refused until Quire has LoRA."""

from quire.refusals import refused_class

LoRARequest = refused_class("LoRARequest")
