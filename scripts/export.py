"""
Exports a model of this family to be served without it: by CTranslate2 or by onnxruntime.

    python scripts/export.py runs/en-de served/en-de --format ctranslate2 --quantization int8
    python scripts/export.py runs/writer served/writer --format ctranslate2
    python scripts/export.py runs/topics served/topics --format onnx
    python scripts/export.py my-name/en-de served/en-de-onnx --format onnx

MODEL is a folder that train.py, convert.py or save_pretrained has left, or an id on the Hub.

ctranslate2  an engine in C++ for models that write: encoder-decoders (its Translator) and decoders (its
             Generator), with cache, beams and batches, on CPUs and GPUs.
onnx         every class of the family, for onnxruntime and whatever else reads ONNX: model.onnx, or
             encoder.onnx and decoder.onnx, of any batch and length. There is no cache of keys and values, so
             each new token costs a pass over the whole text: to write long texts, take ctranslate2.

Before the folder appears, the exported model is run beside the original and must get the same numbers in
float32. What a format cannot represent is refused by name. The tokenizer goes along.
"""

import argparse
import logging
import os
from importlib.util import find_spec
from pathlib import Path


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_transformer_block
from hf_transformer_block.folders import (
    describe_files,
    human,
    load_config,
    load_tokenizer,
    load_whole,
    require_free,
    written_whole,
)


NEEDED = {"ctranslate2": ("ctranslate2",), "onnx": ("onnx", "onnxscript", "onnxruntime")}
QUANTIZATIONS = ("float32", "float16", "bfloat16", "int8")
TRANSLATOR = """
import ctranslate2
{imports}

tokenizer = {loads}
translator = ctranslate2.Translator({folder!r})
tokens = [{tokens} for text in ["First text.", "Second text."]]
for result in translator.translate_batch(tokens, {options}):
    for written in result.hypotheses:
        print(tokenizer.decode({ids}{skip}))"""
GENERATOR = """
import ctranslate2
{imports}

tokenizer = {loads}
generator = ctranslate2.Generator({folder!r})
tokens = [{tokens} for text in ["Once upon", "It was"]]
for result in generator.generate_batch(tokens, max_batch_size=1, include_prompt_in_result=False, {options}):
    for written in result.sequences_ids:
        print(tokenizer.decode(written{skip}))"""
WITH_FILE = {
    "imports": "from tokenizers import Tokenizer",
    "loads": "Tokenizer.from_file({file!r})",
    "tokens": "tokenizer.encode(text).tokens",
    "ids": "[tokenizer.token_to_id(token) for token in written]",
    "skip": "",
}
WITHOUT_FILE = {  # SentencePiece's tokenizers have no tokenizer.json
    "imports": "from transformers import AutoTokenizer",
    "loads": "AutoTokenizer.from_pretrained({folder!r})",
    "tokens": 'tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])',
    "ids": "tokenizer.convert_tokens_to_ids(written)",
    "skip": ", skip_special_tokens=True",
}


def load_model(name: str) -> PreTrainedModel:
    """Returns a model in float32, of the class it was saved from; raises ValueError if it is not whole."""
    config = load_config(name)
    if config.model_type != hf_transformer_block.TransformerBlockConfig.model_type:
        raise ValueError(
            f"{name} is a {config.model_type}, no model of this family: scripts/convert.py makes one of a "
            f"GPT-2, Llama, Mistral, Qwen2, Qwen3 or Marian"
        )
    class_name = (config.architectures or ["none"])[0]
    if class_name not in hf_transformer_block.__all__:
        raise ValueError(f"{name} was saved from {class_name}, which is no class of this family")
    return load_whole(getattr(hf_transformer_block, class_name), name, dtype=torch.float32).eval()


def export_to_ctranslate2(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, quantization: str
) -> None:
    """Writes into a folder and prints how equal the exported model is."""
    from hf_transformer_block.export_ctranslate2 import export

    for stored, found in export(model, tokenizer, folder, quantization).items():
        print(
            f"checked in {stored}: {found.equal} of {found.sequences} greedy texts for random tokens are the "
            f"same, log-probabilities differ by up to {found.difference:.2g} (the largest is "
            f"{found.largest:.3g})"
        )


def export_to_onnx(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Writes into a folder and prints how equal the exported model is."""
    from hf_transformer_block.export_onnx import export

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, which nothing here uses
    for name, found in export(model, tokenizer, folder).items():
        print(
            f"checked {name}: in other shapes than the traced one, values differ by up to "
            f"{found.difference:.2g} (the largest is {found.largest:.3g})"
        )


def snippet(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str) -> str:
    """Returns code that runs what was written for CTranslate2, with the model's settings of generation."""
    from hf_transformer_block.export_ctranslate2_options import generation_options

    options, left_out = generation_options(model, tokenizer)
    without = f"\n\nsettings of generation which this leaves out: {', '.join(left_out)}" if left_out else ""
    file = Path(folder, "tokenizer.json")
    pieces = dict(WITH_FILE if file.exists() else WITHOUT_FILE)
    pieces["loads"] = pieces["loads"].format(file=str(file), folder=folder)
    pieces["options"] = ", ".join(f"{name}={value!r}" for name, value in options.items())
    code = TRANSLATOR if model.config.is_encoder_decoder else GENERATOR
    return code.format(folder=folder, **pieces) + without


def run(arguments: argparse.Namespace) -> None:
    """Exports, one line of report for each stage."""
    folder = Path(arguments.output_dir).resolve()
    require_free(folder)
    missing = [name for name in NEEDED[arguments.format] if find_spec(name) is None]
    if missing:
        raise ValueError(
            f'--format {arguments.format} needs {missing[0]}: pip install "hf_transformer_block[export]"'
        )
    model = load_model(arguments.model)
    size = human(sum(weight.nbytes for weight in model.parameters()))
    print(f"model: {type(model).__name__}, {model.num_parameters():,} parameters, {size} in float32")
    tokenizer = load_tokenizer(arguments.model)
    if tokenizer is None and arguments.format == "ctranslate2":
        raise ValueError(
            f"{arguments.model} has no tokenizer, and a model of ctranslate2 reads and writes its tokens: "
            f"tokenizer.save_pretrained({arguments.model!r})"
        )
    print("tokenizer: none" if tokenizer is None else f"tokenizer: {len(tokenizer):,} tokens")
    with written_whole(folder) as written:
        if arguments.format == "onnx":
            export_to_onnx(model, tokenizer, written)
        else:
            export_to_ctranslate2(model, tokenizer, written, arguments.quantization or "float32")
    print(f"saved: {arguments.output_dir}, {describe_files(folder)}; ", end="")
    if arguments.format == "onnx":
        print("docs/serving.md has code that runs it")
    else:
        print(f"run it with\n{snippet(model, tokenizer, arguments.output_dir)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="Folder, or id on the Hub.")
    parser.add_argument(
        "output_dir", metavar="OUTPUT_DIR", help="Folder to make; an existing one must be empty."
    )
    parser.add_argument("--format", required=True, choices=NEEDED, help="What shall run it.")
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="How ctranslate2 stores the weights: float32 (the default); float16 or bfloat16, half the size, "
        "for GPUs; int8, a quarter of it, the fastest on CPUs, and its texts differ here and there.",
    )
    arguments = parser.parse_args()
    if arguments.quantization and arguments.format == "onnx":
        parser.error(
            f"--quantization {arguments.quantization} is for --format ctranslate2: export without it, then "
            f"onnxruntime.quantization.quantize_dynamic makes an int8 file of the float32 one"
        )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        raise SystemExit(f"export.py: {' '.join(str(error).split())}") from error
    except KeyboardInterrupt:
        raise SystemExit("export.py: interrupted, nothing is written") from None


if __name__ == "__main__":
    main()
