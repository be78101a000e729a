"""vLLM's home of a helper that programs give their requests ids with."""

import uuid


def random_uuid() -> str:
    return uuid.uuid4().hex
