# Copyright 2026 The hf_transformer_block authors. Licensed under the Apache License, Version 2.0.
"""
The pipeline "translation", which transformers 5 removed, for our encoder-decoder: it travels with weights.

Letters in shapes: B texts, N translations of each, L target length, S source length.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import Pipeline, PreTrainedModel, PreTrainedTokenizerBase


MAX_NEW_TOKENS = 256  # as in transformers 4


def check_text(text: Any, name: str) -> None:
    """Raises TypeError unless `text` is one."""
    if not isinstance(text, str):
        shown = repr(text) if len(repr(text)) <= 60 else f"{repr(text)[:60]}..."
        raise TypeError(f"{name} is {shown} of type {type(text).__name__}: give a text or a list of texts")


class TransformerBlockTranslationPipeline(Pipeline):
    """
    Writes the translation of a text, or of each text of a list, with the tokenizer and the model of a folder.

    A translation is `tokenizer.decode(model.generate(...), skip_special_tokens=True)`. What `generate` takes
    (`num_beams=4`, `max_new_tokens=50`, ...) may be given here too, for all calls or for one, and so may the
    `batch_size` of a list. Three things differ from a bare `generate`: where neither the caller nor the
    model's generation config sets a length, it is 256 tokens (`max_position_embeddings` if that is less), not
    20; a caller's `max_length` counts, even if the generation config has a `max_new_tokens`; and a text of
    white space is translated as "", for training leaves such texts out.

    A text longer than the positions of the model is refused, for half a source gives half a translation.
    `truncation=True` cuts it, and also one that is longer than the tokenizer's `model_max_length`.

    Example:
        >>> translator = pipeline("translation", "runs/dates", trust_remote_code=True)
        >>> translator("March 5, 2024")
        [{'translation_text': '2024-03-05'}]
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs):
        if not model.config.is_encoder_decoder:
            raise ValueError(f"translation needs an encoder-decoder, which {type(model).__name__} is not")
        if tokenizer is None:
            raise ValueError("translation needs the model's tokenizer: give tokenizer=")
        super().__init__(model=model, tokenizer=tokenizer, **kwargs)

    def __call__(self, inputs: str | list[str] | Iterator[str], **kwargs) -> list | Iterator[list]:
        """
        Returns [{"translation_text": ...}] for a text, and a list of such dicts for a list of texts.

        Where `num_return_sequences` asks for several translations of each, a list of texts gets a list of
        lists. A generator or a data set of texts gets an iterator of lists, one for each text.

        Raises:
            TypeError: something else than texts.
            ValueError: a text is too long.
        """
        if isinstance(inputs, tuple):
            inputs = list(inputs)
        if not isinstance(inputs, list):
            return super().__call__(inputs, **kwargs)
        for index, text in enumerate(inputs):
            check_text(text, f"input {index} of the list")
        if not inputs:  # the library looks at the first
            return []
        results = super().__call__(inputs, **kwargs)
        is_flat = all(len(translations) == 1 for translations in results)
        return [translations[0] for translations in results] if is_flat else results

    def _sanitize_parameters(self, truncation: bool | None = None, **options) -> tuple[dict, dict, dict]:
        return {} if truncation is None else {"truncation": truncation}, options, {}

    def preprocess(self, text: str, truncation: bool = False) -> dict[str, torch.Tensor]:
        """Returns the ids and mask of a text (1, S), and whether there is nothing to translate (1,)."""
        check_text(text, "the input")
        config, limit = self.model.config, None
        if config.position_embedding in ("sinusoidal", "learned"):
            limit = config.max_position_embeddings
        options = {"verbose": limit is None}
        if truncation:
            longest = limit and min(limit, self.tokenizer.model_max_length)
            options = {"truncation": truncation, "max_length": longest}
        ids = self.tokenizer(text, **options)["input_ids"]
        if limit is not None and len(ids) > limit:
            raise ValueError(
                f"the text {text[:40]!r}... has {len(ids)} tokens, and the model has positions for {limit} "
                f"(max_position_embeddings): split it, or let truncation=True cut it"
            )
        is_empty = torch.tensor([not ids or not text.strip()])
        ids = torch.tensor([ids or [0]])  # the model needs a token, even if nobody reads its translation
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "is_empty": is_empty}

    def limit_length(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the options of `generate` with a length, where nobody set one."""
        if "max_length" in options:
            return {"max_new_tokens": None, **options}  # else that of the generation config comes first
        settings = self.model.generation_config
        if settings.max_new_tokens or settings.max_length or "generation_config" in options:
            return options
        longest = min(MAX_NEW_TOKENS, self.model.config.max_position_embeddings)
        return {"max_new_tokens": longest, **options}

    def _forward(self, inputs: dict[str, torch.Tensor], **options) -> dict[str, torch.Tensor]:
        """Returns the ids of the translations (B, N, L), and whether there was nothing to translate (B,)."""
        is_empty = inputs.pop("is_empty")
        ids = self.model.generate(**inputs, **self.limit_length(options))
        # (B * N, L) -> (B, N, L)
        return {"output_ids": ids.reshape(len(is_empty), -1, ids.shape[-1]), "is_empty": is_empty}

    def postprocess(self, outputs: dict[str, torch.Tensor]) -> list[dict[str, str]]:
        """Returns the translations of one text."""
        texts = self.tokenizer.batch_decode(outputs["output_ids"][0], skip_special_tokens=True)
        return [{"translation_text": "" if outputs["is_empty"].item() else text} for text in texts]
