"""The tokens and the settings of generation of a model, in the words of CTranslate2."""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase


# settings of generation in transformers' words and in those of CTranslate2
OPTIONS = {
    "num_beams": "beam_size",
    "length_penalty": "length_penalty",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
}
NO_OPTIONS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("_from_model_config", "transformers_version", "use_cache", "output_attentions", "output_hidden_states"),
}


def end_token_id(model: PreTrainedModel) -> int:
    """Returns the id of the token that ends a text; raises ValueError if there is none, or several."""
    end = model.generation_config.eos_token_id
    end = model.config.eos_token_id if end is None else end
    ends = end if isinstance(end, list) else [end]
    if len(ends) != 1 or ends[0] is None:
        raise ValueError(
            f"eos_token_id={end}: a model of ctranslate2 ends at one token; give one in "
            f"generation_config.json, or export it to onnx"
        )
    return ends[0]


def start_token_id(model: PreTrainedModel) -> int | None:
    """Returns the id of the first token that a target's decoder reads, None for a single stack."""
    start = model.generation_config.decoder_start_token_id
    return model.config.decoder_start_token_id if start is None else start


def list_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[str]:
    """Returns the tokens in the order of their ids; raises ValueError if the model lacks one."""
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    if (last := max(names)) >= vocab_size:
        raise ValueError(
            f"the tokenizer has token {names[last]!r} with id {last} but the model only vocab_size="
            f"{vocab_size}: take the tokenizer saved with it, or model.resize_token_embeddings"
        )
    # a table may be larger than the vocabulary, for a round number
    return [names.get(number, f"<unused_{number}>") for number in range(vocab_size)]


def generation_options(model: PreTrainedModel) -> tuple[dict[str, Any], list[str]]:
    """Returns settings of generation, and a length, as CTranslate2's arguments; and the others' names."""
    settings = {
        name: value
        for name, value in model.generation_config.to_diff_dict().items()
        if name not in NO_OPTIONS and value is not None
    }
    options = {OPTIONS[name]: settings.pop(name) for name in OPTIONS if name in settings}
    # CTranslate2's own limit may be beyond the last position, where it fails
    longest = min(128, model.config.max_position_embeddings // 2)
    if model.config.is_encoder_decoder and "max_length" in settings:
        longest = settings.pop("max_length") - 1  # it counts the first token
    name = "max_decoding_length" if model.config.is_encoder_decoder else "max_length"
    return options | {name: settings.pop("max_new_tokens", longest)}, sorted(settings)
