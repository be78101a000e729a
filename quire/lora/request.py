"""LoRARequest: which adapter a request is to be answered with, as vLLM has it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import BadRequestError
from quire.params import plain


@dataclass(slots=True, frozen=True)
class LoRARequest:
    """An adapter by name and number, and the folder (or hub id) where PEFT has saved it.

    It is read when it is first used. `load_inplace` reads it again, for files that have changed under the same name.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None  # for people
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise BadRequestError(f"lora_name must be a text, got {self.lora_name!r}", param="lora_name")
        number = plain(self.lora_int_id)
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise BadRequestError(f"lora_int_id must be a whole number >= 1, got {number!r}", param="lora_int_id")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise BadRequestError(
                f"lora_path must be the folder of an adapter, got {self.lora_path!r}", param="lora_path"
            )

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path
