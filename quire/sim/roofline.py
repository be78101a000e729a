"""What a step costs by arithmetic: a model's shape, a device's data sheet, how much of it is reached, and the network.

Tensor parallel divides every product, the KV cache and attention, and adds two sums a layer. Pipeline parallel cuts
the layers into stages, through which as many parts of a step follow each other as there are stages: a full pipe takes
the time of the whole model for one such part. With fewer sequences than stages the rest of the pipe is a bubble, which
the same formula shows: a single sequence gains nothing.

Of a mixture of experts a step reads those that its tokens choose, which is taken to be by chance.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.executor.sizing import MAX_GRAPH_SEQS, MAX_MIXED_PROMPTS, mixed_sizes, padded_size
from quire.models.spec import ModelSpec
from quire.sim.cost import StepCost
from quire.sim.devices import Device, Efficiency, all_reduce_s, product_s, send_s
from quire.step_costs import StepLoad

_VALUE_BYTES = 2  # activations
# Above so many rows layers take longer by `Efficiency.wide_layer_s`, which was fitted with it. The kernels' own bound
# for products that are one launch with their neighbours is 32; with that the fit is a little worse.
MAX_FUSED_ROWS = 16
_MIXED_SIZES = sorted(mixed_sizes(), key=sum)  # a step takes the first that holds it


@dataclass(slots=True)
class RooflineCost(StepCost):
    """`weight_value_bytes` and `kv_value_bytes`: 2 for 16 bits, 1 for 8."""

    spec: ModelSpec
    device: Device
    weight_value_bytes: float = 2.0
    kv_value_bytes: float = 2.0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    efficiency: Efficiency = field(default_factory=Efficiency)
    has_graphs: bool = True  # then steps are padded to what was captured
    kv_token_s: float = 0.0

    def __post_init__(self) -> None:
        spec, device, reached, ranks = self.spec, self.device, self.efficiency, self.tensor_parallel
        head = spec.vocab_size * spec.hidden_size
        kv_heads = -(-spec.num_kv_heads // ranks) * ranks  # all wait for the rank with the largest share
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        mlp, expert, chosen, num_mixed = 3 * spec.hidden_size * spec.intermediate_size, 0, 0, 0
        inner_size = spec.intermediate_size
        body = spec.num_layers * spec.hidden_size * (2 * q_width + 2 * kv_width)
        if (experts := spec.experts) is not None:
            num_mixed = sum(layer.has_experts for layer in spec.layers)
            shared = experts.shared_intermediate_size or 0
            expert, chosen = 3 * spec.hidden_size * experts.intermediate_size, experts.top_k
            body += num_mixed * spec.hidden_size * (experts.num_experts + 3 * shared)
            inner_size = chosen * experts.intermediate_size + shared
        body += (spec.num_layers - num_mixed) * mlp
        memory, arithmetic = device.tb_per_s * 1e12, device.tflop_per_s * 1e12
        self._body_s = body * self.weight_value_bytes / (memory * reached.weights * ranks)
        self._expert_s = num_mixed * expert * self.weight_value_bytes / (memory * reached.weights * ranks)
        self._head_s = head * self.weight_value_bytes / (memory * reached.weights * ranks)
        self._body_token_s = 2 * body / (arithmetic * reached.products * ranks)
        self._experts_token_s = 2 * num_mixed * chosen * expert / (arithmetic * reached.products * ranks)
        self._head_token_s = 2 * head / (arithmetic * reached.products * ranks)
        kv_bytes = 2 * kv_heads * spec.head_dim * spec.num_layers * self.kv_value_bytes
        # Layers with a window read less; what they save is not counted.
        parts = ranks * self.pipeline_parallel  # of a step, each of which meets its part of the context
        self.kv_token_s = kv_bytes / (memory * reached.kv * parts)
        self._pair_s = 4 * q_width * spec.num_layers / (arithmetic * reached.prompt_attention * parts)
        rows = reached.hidden_rows * spec.hidden_size + reached.inner_rows * inner_size / ranks
        self._small_token_s = spec.num_layers * rows * _VALUE_BYTES / (memory * reached.kv)
        self._fixed_s = spec.num_layers * reached.layer_s + num_mixed * reached.experts_layer_s

    def load_s(self, load: StepLoad) -> float:
        if not load.num_tokens:
            return 0.0
        stages = self.pipeline_parallel
        num_rows, num_sampled = self.padded_rows(load)
        num_rows, num_sampled = -(-num_rows // stages), -(-num_sampled // stages)
        seconds = self._fixed_s + product_s(self._body_s, self._body_token_s * num_rows)
        if (experts := self.spec.experts) is not None:
            num_read = experts.num_experts * (1 - (1 - experts.top_k / experts.num_experts) ** num_rows)
            seconds += product_s(self._expert_s * num_read, self._experts_token_s * num_rows)
        if num_rows > MAX_FUSED_ROWS:
            seconds += self.spec.num_layers * self.efficiency.wide_layer_s
        if load.num_prompts:
            seconds += self.spec.num_layers * self.efficiency.prompts_layer_s
        seconds += product_s(self._head_s, self._head_token_s * num_sampled)
        seconds += self._small_token_s * num_rows
        seconds += self.kv_token_s * load.num_decode_kv_tokens + self._pair_s * load.num_causal_pairs
        return seconds + self.network_s(num_rows)

    def network_s(self, num_rows: int) -> float:
        """Sums between ranks and sends between stages, of a step or of a stage's part of it."""
        message = num_rows * self.spec.hidden_size * _VALUE_BYTES
        seconds = 2 * self.spec.num_layers * all_reduce_s(self.device, self.tensor_parallel, message)[0]
        stages, per_machine = self.pipeline_parallel, self.device.per_machine
        for stage in range(1, stages):
            is_within = (stage * self.tensor_parallel) % per_machine != 0
            seconds += send_s(self.device, message, is_within_machine=is_within)
        return seconds

    def padded_rows(self, load: StepLoad) -> tuple[int, int]:
        """Rows that are multiplied, and those whose logits are, as the captured steps pad them."""
        num_decodes, num_prompt_tokens = load.num_decodes, load.num_prompt_tokens
        if self.has_graphs and not num_prompt_tokens and num_decodes <= MAX_GRAPH_SEQS:
            return padded_size(num_decodes), padded_size(num_decodes)
        if self.has_graphs and load.num_prompts <= MAX_MIXED_PROMPTS:
            for rows, prompt_rows in _MIXED_SIZES:
                if rows >= num_decodes and prompt_rows >= num_prompt_tokens:
                    return rows + prompt_rows, rows + MAX_MIXED_PROMPTS
        return num_decodes + num_prompt_tokens, num_decodes + load.num_prompts
