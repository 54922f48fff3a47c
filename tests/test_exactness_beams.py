"""Tests that beam search and prompts of the target write what plain Python over whole forwards writes."""

import itertools
from functools import cache

import pytest
import torch
from conftest import EACH_GENERATIVE, GENERATIVE, SHAPES, model_name, pad, tiny_tokens
from tiny import EACH_PRESET, NEW, STATIC, assert_varied, build, by_hand, write, writer
from torch import nn
from torch.testing import assert_close


pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")

ENCODER_DECODER = SHAPES[2]


def beam_search(next_log_p, prompt: list[int], beams: int, end: int | None, penalty: float) -> list[tuple]:
    """
    Returns the best (score, tokens after the prompt), best first, in plain Python.

    A beam ends with the token `end`, or after `NEW` tokens; only the best `beams` of a step's candidates may
    end. The search stops once `beams` have ended.
    """
    alive, ended = [(0.0, [])], []
    for length in range(1, NEW + 1):
        rows = next_log_p([prompt + tokens for _, tokens in alive])
        candidates = [
            (score + log_p, [*tokens, token])
            for (score, tokens), row in zip(alive, rows, strict=True)
            for token, log_p in enumerate(row)
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        alive = []
        for rank, (score, tokens) in enumerate(candidates[: 2 * beams]):
            if tokens[-1] != end and length < NEW:
                alive.append((score, tokens))
            elif rank < beams:
                ended.append((score / length**penalty, tokens))
        alive = alive[:beams]
        if len(ended) >= beams:
            break
    return sorted(ended, key=lambda candidate: -candidate[0])[:beams]


def log_p_after(model: nn.Module, source: torch.Tensor | None):
    """Returns a function from prefixes of one length to the log-probabilities of the next token."""

    @torch.no_grad()
    def next_log_p(prefixes: list[list[int]]) -> list[list[float]]:
        written = torch.tensor(prefixes)
        inputs = {"input_ids": written}
        if source is not None:
            inputs = {"input_ids": source.expand(len(written), -1), "decoder_input_ids": written}
        return model(**inputs, use_cache=False).logits[:, -1].double().log_softmax(dim=-1).tolist()

    return next_log_p


@pytest.mark.parametrize(
    ("pad_id", "kwargs"),
    [*((pad_id, {}) for pad_id in (0, 5, 60, "end", None)), (5, {"use_cache": False}), (60, STATIC)],
    ids=["0", "5", "last", "end", "none", "uncached", "static"],
)
@pytest.mark.parametrize(
    ("head", "shape", "preset"), [(*GENERATIVE[0], "modern"), (*GENERATIVE[1], "vaswani")], ids=model_name
)
def test_GN8_beam_search_is_that_of_plain_python_with_any_pad_id(head, shape, preset, pad_id, kwargs):
    beams, penalty = 3, 0.7
    model = writer(head, shape, preset, pad_token_id=None)
    rows = [tiny_tokens(length) for length in (6, 2, 4)]
    is_pair = shape == ENCODER_DECODER
    start = [model.config.decoder_start_token_id]
    steps = [log_p_after(model, row if is_pair else None) for row in rows]
    prompts = [start if is_pair else row.tolist() for row in rows]
    # an end which the best beam of the first row comes across
    end = beam_search(steps[0], prompts[0], beams, None, penalty)[0][1][3]
    pad_id = end if pad_id == "end" else pad_id
    expected = [
        beam_search(step, prompt, beams, end, penalty) for step, prompt in zip(steps, prompts, strict=True)
    ]
    lengths = {len(tokens) for row in expected for _, tokens in row}
    assert len(lengths) > 1
    for side in ("left", "right") if is_pair else ("left",):
        batch = pad(rows, side)
        batch["input_ids"].masked_fill_(batch["attention_mask"] == 0, 9 if pad_id is None else pad_id)
        written = model.generate(
            **batch,
            max_new_tokens=NEW,
            do_sample=False,
            num_beams=beams,
            num_return_sequences=beams,
            length_penalty=penalty,
            early_stopping=True,
            eos_token_id=end,
            pad_token_id=pad_id,
            return_dict_in_generate=True,
            output_scores=True,
            **kwargs,
        )
        flat = [candidate for row in expected for candidate in row]
        scores = torch.tensor([score for score, _ in flat])
        assert_close(written.sequences_scores, scores, rtol=0, atol=3e-6)
        first = 1 if is_pair else 6
        for sequence, (_, tokens) in zip(written.sequences[:, first:].tolist(), flat, strict=True):
            assert sequence[: len(tokens)] == tokens
            # the library fills with the end token if there is no pad id, or if it is 0
            assert set(sequence[len(tokens) :]) <= {pad_id or end}


@EACH_GENERATIVE
def test_a_beam_as_wide_as_the_vocabulary_finds_the_best_of_all_sequences(head, shape):
    words, new = 6, 3
    model = build(head, shape, "modern", vocab_size=words, tie_word_embeddings=False, initializer_range=0.5)
    end = model.config.eos_token_id
    row = torch.randint(3, words, (5,))
    prompt = [model.config.decoder_start_token_id] if shape == ENCODER_DECODER else row.tolist()
    log_p = log_p_after(model, row if shape == ENCODER_DECODER else None)

    @cache
    def after(tokens: tuple[int, ...]) -> list[float]:
        return log_p([prompt + list(tokens)])[0]

    scores = {}
    for sequence in itertools.product(range(words), repeat=new):
        stop = sequence.index(end) + 1 if end in sequence else new
        tokens = sequence[:stop]
        if tokens not in scores:
            scores[tokens] = sum(after(tokens[:index])[tokens[index]] for index in range(stop))
    best = sorted(scores, key=scores.get, reverse=True)[:5]
    assert len({len(tokens) for tokens in best}) > 1
    written = model.generate(
        row[None],
        max_new_tokens=new,
        do_sample=False,
        num_beams=words**2,
        num_return_sequences=5,
        length_penalty=0.0,
        early_stopping="never",
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert_close(
        written.sequences_scores, torch.tensor([scores[tokens] for tokens in best]), rtol=0, atol=3e-6
    )
    for sequence, tokens in zip(written.sequences[:, -new:].tolist(), best, strict=True):
        assert tuple(sequence[: len(tokens)]) == tokens


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"use_cache": False}, STATIC, {"num_beams": 3}],
    ids=["dynamic", "uncached", "static", "beams"],
)
@EACH_PRESET
def test_GN8_left_padded_target_prompts_and_padded_sources(preset, kwargs):
    model = writer(*GENERATIVE[1], preset)
    rows = [tiny_tokens(length) for length in (6, 2, 4)]
    prompts = [tiny_tokens(length) for length in (3, 5, 1)]
    if "num_beams" in kwargs:
        alone = [
            write(model, row[None], decoder_input_ids=prompt[None], **kwargs)[0]
            for row, prompt in zip(rows, prompts, strict=True)
        ]
    else:
        alone = [by_hand(model, row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
    assert_varied(torch.stack(alone))
    target = pad(prompts, "left")
    decoder = {"decoder_input_ids": target["input_ids"], "decoder_attention_mask": target["attention_mask"]}
    for side in ("left", "right"):
        source = pad(rows, side)
        ids, mask = source["input_ids"], source["attention_mask"]
        written = write(model, ids, attention_mask=mask, **decoder, **kwargs)
        assert torch.equal(written, torch.stack(alone))
