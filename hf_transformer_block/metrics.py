"""Scores of what a model predicts, in percent: translations, classes, entities and answers."""

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

import sacrebleu


HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
KANA, HANGUL = "\u3041-\u30ff\uff66-\uff9f", "\u1100-\u11ff\u3131-\u318e\uac00-\ud7a3"


def bits_per_byte(loss: float, tokens: int, num_bytes: int) -> float:
    """Returns a loss (nats per predicted token) as bits per byte of the text, whatever the tokenizer."""
    return loss * tokens / (math.log(2) * num_bytes)


def bleu_tokenizer(references: Sequence[str]) -> str:
    """
    Returns sacreBLEU's tokenizer for the script of most letters.

    It is "zh" for Chinese and "13a" where spaces part the words. Japanese and Korean go by "char", for what
    sacreBLEU has for these two needs packages which it does not bring.
    """
    text = "".join(references)
    han, others = (len(re.findall(f"[{letters}]", text)) for letters in (HAN, KANA + HANGUL))
    if 2 * (han + others) <= sum(map(str.isalpha, text)):
        return "13a"
    return "zh" if han > 9 * others else "char"  # half of what the Japanese write is kana


def score_translations(
    hypotheses: Sequence[str], references: Sequence[str], tokenize: str | None = None
) -> dict[str, float | str]:
    """
    Returns exact match, BLEU and chrF, with sacreBLEU's signatures.

    `tokenize` is sacreBLEU's: "none" for texts that are tokenized already; by default see `bleu_tokenizer`.
    """
    bleu = sacrebleu.BLEU(tokenize=tokenize or bleu_tokenizer(references), force=tokenize == "none")
    chrf = sacrebleu.CHRF()
    return {
        "exact_match": accuracy(hypotheses, references),
        "bleu": bleu.corpus_score(hypotheses, [references]).score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf": chrf.corpus_score(hypotheses, [references]).score,
        "chrf_signature": str(chrf.get_signature()),
    }


def accuracy(predictions: Sequence, references: Sequence) -> float:
    """Returns how many predictions equal their references."""
    equal = sum(guess == truth for guess, truth in zip(predictions, references, strict=True))
    return 100 * equal / len(references)


def f1_score(true_positives: int, predicted: int, actual: int) -> float:
    """Returns the harmonic mean of precision and recall, 2 TP / (predicted + actual); 0 where neither is."""
    return 200 * true_positives / (predicted + actual) if predicted + actual else 0.0


def class_scores(predictions: Sequence, references: Sequence) -> dict[str, float]:
    """
    Returns accuracy, macro F1 (mean over the classes that are predicted or true) and micro F1.

    Micro F1 equals accuracy, since each example has just one class; it is there for those who look for it.
    """
    predicted, actual = Counter(predictions), Counter(references)
    pairs = zip(predictions, references, strict=True)
    hits = Counter(guess for guess, truth in pairs if guess == truth)
    each = [f1_score(hits[label], predicted[label], actual[label]) for label in predicted | actual]
    return {
        "accuracy": accuracy(predictions, references),
        "macro_f1": sum(each) / len(each),
        "micro_f1": f1_score(hits.total(), predicted.total(), actual.total()),
    }


def is_bio(labels: Sequence[str]) -> bool:
    """Returns whether labels mark entities: "B-" and "I-" with a type, and "O" for the rest."""
    return any(label != "O" for label in labels) and all(re.fullmatch("O|[BI]-.+", label) for label in labels)


def find_entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """
    Returns the entities of a sentence: first word, last word, type.

    As in conlleval, "B-" begins an entity, and so does an "I-" that continues none of its type.
    """
    entities, first, kind = set(), 0, ""
    for index, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        if kind and (prefix != "I" or name != kind):
            entities.add((first, index - 1, kind))
            kind = ""
        if not kind and prefix != "O":
            first, kind = index, name
    return entities


def entity_scores(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Returns precision, recall and F1 of entities, right with borders and type, in sentences of BIO tags."""
    hits = predicted = actual = 0
    for guess, truth in zip(predictions, references, strict=True):
        found, expected = find_entities(guess), find_entities(truth)
        hits, predicted, actual = hits + len(found & expected), predicted + len(found), actual + len(expected)
    return {
        "precision": 100 * hits / max(1, predicted),
        "recall": 100 * hits / max(1, actual),
        "f1": f1_score(hits, predicted, actual),
    }


def answer_words(text: str, is_spaced: bool) -> list[str]:
    """
    Returns the words of an answer by which it is compared, lower-cased and without punctuation.

    Without spaces between words, as in Chinese, each character is one. Source: the evaluation scripts of
    SQuAD 2.0, which also leaves out English articles, and of MLQA (github.com/facebookresearch/MLQA) for zh.
    """
    text = text.lower()
    if is_spaced:
        text = text.translate(str.maketrans("", "", string.punctuation))
        return re.sub(r"\b(a|an|the)\b", " ", text).split()
    kept = (c for c in text if c not in string.punctuation and not unicodedata.category(c).startswith("P"))
    return re.sub(f"([{HAN}{KANA}])", r" \1 ", "".join(kept)).split()


def squad_scores(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """
    Returns exact match and mean F1 of answers, each against the best of its references.

    No references at all: the question has no answer, and "" is right.
    """
    is_spaced = bleu_tokenizer([truth for truths in references for truth in truths]) == "13a"
    matches = f1 = 0.0
    for guess, truths in zip(predictions, references, strict=True):
        found = answer_words(guess, is_spaced)
        expected = [answer_words(truth, is_spaced) for truth in truths or [""]]
        matches += found in expected
        f1 += max(overlap(found, words) for words in expected)
    return {"exact_match": 100 * matches / len(references), "f1": f1 / len(references)}


def overlap(found: list[str], expected: list[str]) -> float:
    """Returns the F1 of two bags of words; without any words in one, whether there are none in the other."""
    if not found or not expected:
        return 100.0 * (found == expected)
    return f1_score((Counter(found) & Counter(expected)).total(), len(found), len(expected))
