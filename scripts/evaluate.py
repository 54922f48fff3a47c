"""
Scores a saved folder, or a model of the Hub: exact match, BLEU and chrF, or perplexity and bits per byte.

    python scripts/evaluate.py runs/dates                                     on dates that training never saw
    python scripts/evaluate.py runs/en-de --files test.en test.de --num_beams 5
    python scripts/evaluate.py runs/writer --files book.txt
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

from accelerate import Accelerator
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


try:
    from datasets import Dataset

    from hf_transformer_block import training
    from hf_transformer_block.arguments import HelpFormatter, flag
    from hf_transformer_block.data import read_pairs, read_texts, tokenize_stream
    from hf_transformer_block.dates import date_pairs
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is missing: pip install "hf_transformer_block[train]"') from error


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
    sources, references = list(pairs["source"]), list(pairs["target"])
    hypotheses = training.translate(accelerator, model, tokenizer, sources, arguments.batch_size, **beams)
    if arguments.output_file and accelerator.is_main_process:
        Path(arguments.output_file).write_text("".join(f"{line}\n" for line in hypotheses), encoding="utf-8")
    return {"pairs": len(pairs), **training.score_translations(hypotheses, references)}


def score_text(
    accelerator: Accelerator,
    arguments: Arguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, float | str]:
    """Returns how well the model predicts texts, in blocks as long as the model was trained on."""
    if arguments.files is None:
        raise ValueError("a language model is scored on texts: give --files")
    texts = read_texts(arguments.files, arguments.text_column)
    blocks = tokenize_stream(texts, tokenizer, model.config.max_position_embeddings - 1)
    return training.evaluate_text(
        accelerator, model, blocks, texts, arguments.batch_size, tokenizer.pad_token_id
    )


def main() -> None:
    parser = HfArgumentParser(
        Arguments, description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="Folder, or id on the Hub.")
    arguments, named = parser.parse_args_into_dataclasses()
    accelerator = Accelerator()
    training.use_all_cores(accelerator)
    try:
        config = AutoConfig.from_pretrained(named.model)
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = auto.from_pretrained(named.model).to(accelerator.device)
        tokenizer = AutoTokenizer.from_pretrained(named.model)
        score = score_translation if config.is_encoder_decoder else score_text
        result = score(accelerator, arguments, model, tokenizer)
    except (ValueError, OSError) as error:
        raise SystemExit(f"evaluate.py: {error}") from error
    if accelerator.is_main_process:
        print(json.dumps(result, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
