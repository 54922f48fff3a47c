"""Runs a model that was exported for CTranslate2 beside the original, on random tokens."""

from dataclasses import dataclass
from pathlib import Path

import ctranslate2
import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .configuration_hf_transformer_block import TransformerBlockConfig
from .export_ctranslate2_options import end_token_id, list_tokens, start_token_id


# how the weights are stored, and what a CPU computes with then
COMPUTE_TYPES = {"float32": "float32", "float16": "float32", "bfloat16": "float32", "int8": "int8"}


@dataclass(frozen=True)
class Comparison:
    """
    What an exported model computed on random tokens, beside the original.

    Attributes:
        sequences: how many were continued greedily.
        equal: how many of these came out the same, token by token.
        difference: largest difference of the log-probabilities.
        largest: largest absolute value of the log-probabilities.
    """

    sequences: int
    equal: int
    difference: float
    largest: float


def draw_rows(config: TransformerBlockConfig, tokenizer: PreTrainedTokenizerBase) -> list[torch.Tensor]:
    """Returns random tokens of eight lengths, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    longest = max(1, min(20, config.max_position_embeddings // 2))
    lengths = [1 + number * (longest - 1) // 7 for number in range(8)]
    # a source of special tokens alone is empty for CTranslate2, and so is its translation
    ordinary = torch.tensor(sorted(set(range(config.vocab_size)) - set(tokenizer.all_special_ids)))
    return [ordinary[torch.randint(len(ordinary), (length,), generator=generator)] for length in lengths]


@torch.no_grad()
def write_greedily(model: PreTrainedModel, row: torch.Tensor, length: int, end: int) -> list[int]:
    """Returns the most likely continuation of a row, without its end; `generate` would obey the settings."""
    inputs, name, written = {}, "input_ids", row
    if model.config.is_encoder_decoder:
        inputs, name, written = {name: row[None]}, "decoder_input_ids", torch.tensor([start_token_id(model)])
    first = len(written)
    for _ in range(length):
        likeliest = model(**inputs, **{name: written[None]}, use_cache=False).logits[0, -1].argmax()
        if likeliest == end:
            break
        written = torch.cat([written, likeliest[None]])
    return written[first:].tolist()


@torch.no_grad()
def score(model: PreTrainedModel, row: torch.Tensor, end: int) -> torch.Tensor:
    """Returns log-probabilities: of every next token of a text, or of a source as its own translation."""
    if not model.config.is_encoder_decoder:
        return model(input_ids=row[None], use_cache=False).logits[0].log_softmax(dim=-1)
    target = torch.cat([torch.tensor([start_token_id(model)]), row, torch.tensor([end])])
    logits = model(input_ids=row[None], decoder_input_ids=target[None, :-1], use_cache=False).logits[0]
    return logits.log_softmax(dim=-1).gather(1, target[1:, None])[:, 0]


def run_translator(
    folder: Path, texts: list[list[str]], length: int, compute_type: str
) -> tuple[list[torch.Tensor], list[list[str]]]:
    """Returns what `score` and `write_greedily` do, in tokens, by an exported encoder-decoder."""
    threads = torch.get_num_threads()
    translator = ctranslate2.Translator(str(folder), compute_type=compute_type, intra_threads=threads)
    scores = [torch.tensor(result.log_probs) for result in translator.score_batch(texts, texts)]
    results = translator.translate_batch(
        texts, beam_size=1, max_decoding_length=length, min_decoding_length=0
    )
    return scores, [result.hypotheses[0] for result in results]


def run_generator(
    folder: Path, texts: list[list[str]], length: int, compute_type: str
) -> tuple[list[torch.Tensor], list[list[str]]]:
    """Returns what `score` and `write_greedily` do, in tokens, by an exported decoder."""
    threads = torch.get_num_threads()
    generator = ctranslate2.Generator(str(folder), compute_type=compute_type, intra_threads=threads)
    padded = torch.from_numpy(np.array(generator.forward_batch(texts, return_log_probs=True)))
    scores = [row[: len(text)] for row, text in zip(padded, texts, strict=True)]
    # in a batch, prompts of unequal lengths would come back with their last tokens
    results = generator.generate_batch(
        texts, max_batch_size=1, max_length=length, include_prompt_in_result=False
    )
    return scores, [result.sequences[0] for result in results]


def compare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, stored: str
) -> Comparison:
    """Compares an exported model with the original on random tokens: log-probabilities, greedy texts."""
    config, end = model.config, end_token_id(model)
    names = list_tokens(tokenizer, config.vocab_size)
    rows = draw_rows(config, tokenizer)
    texts = [[names[number] for number in row.tolist()] for row in rows]
    length = max(1, min(24, config.max_position_embeddings // 2 - 1))
    run = run_translator if config.is_encoder_decoder else run_generator
    scores, written = run(folder, texts, length, COMPUTE_TYPES[stored])
    ours = [score(model, row, end) for row in rows]
    continued = [[names[number] for number in write_greedily(model, row, length, end)] for row in rows]
    return Comparison(
        sequences=len(rows),
        equal=sum(mine == theirs for mine, theirs in zip(continued, written, strict=True)),
        difference=max(float((mine - theirs).abs().max()) for mine, theirs in zip(ours, scores, strict=True)),
        largest=max(float(mine.abs().max()) for mine in ours),
    )
