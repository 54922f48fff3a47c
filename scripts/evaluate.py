"""
Scores a saved folder, or a model of the Hub: exact match, BLEU and chrF, or perplexity and bits per byte.

    python scripts/evaluate.py runs/dates                                     on dates that training never saw
    python scripts/evaluate.py runs/en-de --files test.en test.de --num_beams 5
    python scripts/evaluate.py runs/writer --files book.txt
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path


os.environ["OMP_WAIT_POLICY"] = os.environ.get(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch starts its threads

from accelerate import Accelerator
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_transformer_block.arguments import HelpFormatter, flag
from hf_transformer_block.data import read_pairs, read_texts, tokenise_stream
from hf_transformer_block.dates import date_pairs
from hf_transformer_block.training import (
    bits_per_byte,
    evaluate,
    score_translations,
    translate,
    use_all_cores,
)


@dataclass
class Arguments:
    """What to score, and on what."""

    files: list[str] | None = flag(
        None,
        "translation: one file with two columns or two parallel text files; causal-lm: any number of files. "
        "Without: the embedded dates of the test split.",
    )
    source_column: str = flag("source", "Column of the text to translate.")
    target_column: str = flag("target", "Column of its translation.")
    text_column: str = flag("text", "Column of the documents of a language model.")
    batch_size: int = flag(64, "Texts at a time.")
    num_beams: int | None = flag(None, "Beams. Without: the model's generation config.")
    output_file: str | None = flag(None, "File for the translations, one a line.")


def score_translation(
    accelerator: Accelerator,
    arguments: Arguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, float | str]:
    """Returns the scores of the model's translations, and writes them if asked to."""
    if arguments.files is None:
        pairs = Dataset.from_list(date_pairs("test", 2_000))
    else:
        pairs = read_pairs(arguments.files, arguments.source_column, arguments.target_column)
    beams = {} if arguments.num_beams is None else {"num_beams": arguments.num_beams}
    hypotheses = translate(
        accelerator, model, tokenizer, list(pairs["source"]), arguments.batch_size, **beams
    )
    if arguments.output_file and accelerator.is_main_process:
        Path(arguments.output_file).write_text("".join(f"{line}\n" for line in hypotheses), encoding="utf-8")
    return {"pairs": len(pairs), **score_translations(hypotheses, list(pairs["target"]))}


def score_text(
    accelerator: Accelerator,
    arguments: Arguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, float | str]:
    """Returns how well the model predicts texts."""
    if arguments.files is None:
        raise SystemExit("a language model is scored on texts: give --files")
    texts = read_texts(arguments.files, arguments.text_column)
    blocks = tokenise_stream(texts, tokenizer, model.config.max_position_embeddings - 1)
    result = evaluate(accelerator, model, blocks, arguments.batch_size, tokenizer.pad_token_id)
    num_bytes = sum(len(text.encode()) for text in texts["text"])
    bits = bits_per_byte(result["loss"], result["tokens"], num_bytes)
    return {**result, "perplexity": math.exp(result["loss"]), "bits_per_byte": bits, "bytes": num_bytes}


def main() -> None:
    parser = HfArgumentParser(
        Arguments, description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="Folder, or id on the Hub.")
    arguments, named = parser.parse_args_into_dataclasses()
    accelerator = Accelerator()
    use_all_cores(accelerator)
    config = AutoConfig.from_pretrained(named.model)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_pretrained(named.model).to(accelerator.device)
    tokenizer = AutoTokenizer.from_pretrained(named.model)
    score = score_translation if config.is_encoder_decoder else score_text
    result = score(accelerator, arguments, model, tokenizer)
    if accelerator.is_main_process:
        print(json.dumps(result, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
