"""The HTTP server: OpenAI's API on one side, `quire.engine.api.ServingEngine` on the other. Never imports torch."""
