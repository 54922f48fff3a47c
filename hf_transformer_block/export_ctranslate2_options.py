"""The tokens and the settings of generation of a model, in the words of CTranslate2."""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# settings of generation in transformers' words and in those of CTranslate2
OPTIONS = {
    "num_beams": "beam_size",
    "num_return_sequences": "num_hypotheses",
    "length_penalty": "length_penalty",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
}
SAMPLING = {"top_k": "sampling_topk", "top_p": "sampling_topp", "temperature": "sampling_temperature"}
TOP_K = 50  # of which `generate` draws if it is not told otherwise
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


def take_sampling(settings: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Takes what is about sampling out of the settings, and returns what of it has an effect."""
    values = {name: settings.pop(name) for name in SAMPLING if name in settings}
    if not settings.pop("do_sample", False):
        return {}
    values["top_k"] = min(values.get("top_k", TOP_K), vocab_size)
    return {SAMPLING[name]: values[name] for name in SAMPLING if name in values}


def take_suppressed(settings: dict[str, Any], tokens: list[str], end: int) -> dict[str, Any]:
    """Takes what shall not be written out of the settings, and returns it in tokens."""
    words = [ids for ids in settings.pop("bad_words_ids", []) if ids != [end]]  # nor does `generate` obey it
    words += [[number] for number in settings.pop("suppress_tokens", [])]
    return {"suppress_sequences": [[tokens[number] for number in ids] for ids in words]} if words else {}


def take_lengths(settings: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Takes lengths out of the settings, and returns them, the longest one in any case."""
    # CTranslate2's own limit may be beyond the last position, where it fails
    longest, shortest = min(128, config.max_position_embeddings // 2), 0
    if config.is_encoder_decoder:  # whose lengths count the first token, which a decoder's prompt hides
        longest = settings.pop("max_length", longest + 1) - 1
        shortest = max(0, settings.pop("min_length", 1) - 1)
    longest, shortest = settings.pop("max_new_tokens", longest), settings.pop("min_new_tokens", shortest)
    if config.is_encoder_decoder:  # CTranslate2 would write one token at least
        return {"min_decoding_length": shortest, "max_decoding_length": longest}
    return {"min_length": shortest, "max_length": longest} if shortest else {"max_length": longest}


def generation_options(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Any], list[str]]:
    """Returns settings of generation, and a length, as CTranslate2's arguments; and the others' names."""
    settings = {
        name: value
        for name, value in model.generation_config.to_diff_dict().items()
        if name not in NO_OPTIONS and value is not None
    }
    # a Translator searches with two beams, unless it is told
    options = {"beam_size": 1} if model.config.is_encoder_decoder else {}
    options |= {OPTIONS[name]: settings.pop(name) for name in OPTIONS if name in settings}
    if settings.get("early_stopping") is True:  # which CTranslate2 does in any case
        settings.pop("early_stopping")
    options |= take_sampling(settings, model.config.vocab_size)
    tokens = list_tokens(tokenizer, model.config.vocab_size)
    options |= take_suppressed(settings, tokens, end_token_id(model))
    options |= take_lengths(settings, model.config)
    return options, sorted(settings)
