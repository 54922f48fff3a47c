"""
Turns a checkpoint of transformers into a folder of this family, with the same logits in float32.

    python scripts/convert.py Helsinki-NLP/opus-mt-en-de runs/en-de     an id on the Hub
    python scripts/convert.py my-llama runs/my-llama                    a folder

Known are GPT-2, Llama, Mistral, Qwen2 and Qwen3 as causal language models, and Marian translators. Weights,
their dtype, generation config and tokenizer are kept. What the family cannot represent (a sliding window,
experts, quantised weights and so on) is refused by name, before anything is written. The two models are
compared on random tokens first, so it takes twice the checkpoint's memory, or four times if its weights are
16-bit. The folder holds the family's code too, so AutoModel loads it anywhere.
"""

import argparse
import os
from pathlib import Path


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_transformer_block.convert import convert, convert_config
from hf_transformer_block.folders import (
    describe_files,
    human,
    load_config,
    load_tokenizer,
    load_whole,
    require_free,
    written_whole,
)


SNIPPET = """
from transformers import {auto}{and_tokenizer}

{tokenizer}model = {auto}.from_pretrained({folder!r}, trust_remote_code=True)"""


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Writes both, or nothing."""
    with written_whole(folder) as written:
        model.save_pretrained(written)
        if tokenizer is not None:
            tokenizer.save_pretrained(written)


def run(source: str, out: str) -> None:
    """Converts, one line of report for each stage."""
    folder = Path(out).resolve()
    require_free(folder)
    config = load_config(source)
    convert_config(config)  # raises ValueError for what our block cannot represent
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        print("tokenizer: none beside the source")
    else:
        print(f"tokenizer: {type(tokenizer).__name__}, {len(tokenizer):,} tokens")
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    theirs = load_whole(auto, source, dtype="auto")
    dtype = str(theirs.dtype).removeprefix("torch.")
    size = human(sum(weight.nbytes for weight in theirs.parameters()))
    print(f"source: {type(theirs).__name__}, {theirs.num_parameters():,} parameters, {dtype}, {size}")
    ours = convert(theirs)
    print(f"converted: {type(ours).__name__}, {ours.num_parameters():,} parameters, same logits in float32")
    save(ours, tokenizer, folder)
    print(f"saved: {out}, {describe_files(folder)}; load it anywhere with")
    loads = f"tokenizer = AutoTokenizer.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
    print(
        SNIPPET.format(
            auto=auto.__name__,
            and_tokenizer="" if tokenizer is None else ", AutoTokenizer",
            tokenizer="" if tokenizer is None else loads,
            folder=str(folder),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", metavar="SOURCE", help="Folder, or id on the Hub.")
    parser.add_argument("out", metavar="OUT", help="Folder to make; an existing one must be empty.")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        run(arguments.source, arguments.out)
    except (ValueError, OSError) as error:
        raise SystemExit(f"convert.py: {' '.join(str(error).split())}") from error
    except KeyboardInterrupt:
        raise SystemExit("convert.py: interrupted, nothing is written") from None


if __name__ == "__main__":
    main()
