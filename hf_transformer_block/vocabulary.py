"""Tokenizers trained on the spot, and ready ones: what a run encodes its texts with."""

from collections.abc import Iterator
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast


SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOKENIZERS = ("bpe", "char", "word")
# how a text is framed, and a pair of texts; a decoder's can go on
TEMPLATES = {
    "encoder-decoder": ("$A </s>", None),
    "encoder": ("<s> $A </s>", "<s> $A </s> $B </s>"),
    "decoder": (None, None),
}


def untrained_tokenizer(kind: str) -> Tokenizer:
    """Returns a tokenizer without vocabulary; raises ValueError for an unknown kind."""
    if kind not in TOKENIZERS:
        raise ValueError(f"tokenizer kind {kind!r} is unknown (known: {', '.join(TOKENIZERS)})")
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
    tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "char":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
    return tokenizer


def train_tokenizer(
    texts: Iterator[str], kind: str, vocab_size: int, max_length: int, architecture: str, mask: bool = False
) -> PreTrainedTokenizerFast:
    """
    Trains a tokenizer that AutoTokenizer loads: "bpe" (byte-level, digits apart), "char" or "word".

    A text of an encoder-decoder becomes `A </s>`, one of an encoder `<s> A </s>` or `<s> A </s> B </s>`; a
    decoder's stays open and is padded on the left. With `mask` there is a `<mask>`. `vocab_size` is an upper
    limit; "char" and "word" keep the most frequent.
    """
    tokenizer = untrained_tokenizer(kind)
    special: dict[str, Any] = dict(SPECIAL_TOKENS)
    if mask:
        # a hidden word takes the space before it along, as the tokens of "bpe" do
        special["mask_token"] = AddedToken("<mask>", lstrip=kind == "bpe", special=True)
    options = {"vocab_size": vocab_size, "special_tokens": [*special.values()], "show_progress": False}
    if kind == "bpe" and vocab_size < (least := 256 + len(special)):
        raise ValueError(
            f"--vocab_size {vocab_size} has no room for all bytes and special tokens: at least {least}"
        )
    if kind == "bpe":
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    else:
        trainer = trainers.WordLevelTrainer(**options)
    tokenizer.train_from_iterator(texts, trainer)
    single, pair = TEMPLATES[architecture]
    if single:
        frame = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
        tokenizer.post_processor = processors.TemplateProcessing(single, pair, frame)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        padding_side="left" if architecture == "decoder" else "right",
        clean_up_tokenization_spaces=False,
        **special,
    )
