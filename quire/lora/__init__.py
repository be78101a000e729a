"""vLLM's home of LoRA requests."""
