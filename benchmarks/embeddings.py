"""Embeddings beside sentence-transformers, on the same texts in the same process, turn by turn:

    python -m benchmarks.embeddings MODEL                          where it is installed
    python -m benchmarks.embeddings MODEL --against transformers   by its recipe: batches of texts by length, padded

Texts have 5 to 400 tokens. Told are texts and tokens a second, the processor time of both (for machines that have other
work), and the smallest cosine between the two.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from quire import LLM


def make_texts(words: list[str], count: int, longest: int) -> list[str]:
    chooser = random.Random(0)
    return [" ".join(chooser.choices(words, k=chooser.randint(3, longest - 2))) for _ in range(count)]


def sentence_transformers(args: argparse.Namespace, length: int) -> Callable[[list[str]], torch.Tensor]:
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    options = {"dtype": torch.float16 if args.device == "cuda" else torch.float32}
    model = SentenceTransformer(args.model, device=args.device, model_kwargs=options)
    model.max_seq_length = length
    return lambda texts: model.encode(texts, batch_size=args.batch, convert_to_tensor=True).float().cpu()


def by_transformers(args: argparse.Namespace, length: int) -> Callable[[list[str]], torch.Tensor]:
    """Mean pooling, as MiniLM has it."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dtype = torch.float16 if args.device == "cuda" else torch.float32
    model = AutoModel.from_pretrained(args.model, dtype=dtype).to(args.device).eval()

    def embed(texts: list[str]) -> torch.Tensor:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found: list[Any] = [None] * len(texts)
        with torch.inference_mode():
            for at in range(0, len(order), args.batch):
                some = order[at : at + args.batch]
                inputs = tokenizer(
                    [texts[i] for i in some], padding=True, truncation=True, max_length=length, return_tensors="pt"
                ).to(args.device)
                hidden = model(**inputs).last_hidden_state
                mask = inputs["attention_mask"][:, :, None].to(hidden.dtype)
                vectors = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
                for i, vector in zip(some, vectors, strict=True):
                    found[i] = vector
            return torch.stack(found).float().cpu()

    return embed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--against", choices=("sentence-transformers", "transformers"), default="sentence-transformers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=400, help="tokens of the longest text")
    parser.add_argument("--batch", type=int, default=32, help="of the other one")
    parser.add_argument("--threads", type=int, help="of both, on a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    llm = LLM(args.model, device=args.device, num_threads=args.threads, max_model_len=512)
    vocabulary = llm.get_tokenizer().get_vocab()
    words = sorted(word for word in vocabulary if word.isalpha() and word.isascii() and 3 <= len(word) <= 8)
    texts = make_texts(words, args.texts, args.longest)
    other = (sentence_transformers if args.against == "sentence-transformers" else by_transformers)(args, 512)

    def ours(batch: list[str]) -> torch.Tensor:
        return torch.tensor([output.outputs.embedding for output in llm.embed(batch, use_tqdm=False)])

    num_tokens = sum(len(output.prompt_token_ids) for output in llm.embed(texts, use_tqdm=False))
    cosines = F.cosine_similarity(ours(texts), other(texts))
    best: dict[str, tuple[float, float]] = {}
    for _ in range(args.rounds):
        for name, run in (("quire", ours), (args.against, other)):
            wall, processor = time.perf_counter(), time.process_time()
            run(texts)
            took = time.perf_counter() - wall, time.process_time() - processor
            best[name] = min(best.get(name, took), took, key=lambda pair: pair[args.device == "cpu"])
    print(f"{args.texts} texts, {num_tokens} tokens, {args.device}; smallest cosine {cosines.min().item():.7f}")
    for name, (wall_s, processor_s) in best.items():
        rate = f"{args.texts / wall_s:9.1f} texts/s {num_tokens / wall_s:11.0f} tokens/s"
        print(f"{name:24}{rate} {wall_s:8.3f} s {processor_s:8.3f} s of processors")
    (wall, processor), (other_wall, other_processor) = best.values()
    print(f"ratio: {other_wall / wall:.2f} by the clock, {other_processor / processor:.2f} by processor time")


if __name__ == "__main__":
    main()
