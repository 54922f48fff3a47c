"""
Draws what a saved model attends to: one layer's attention, of one head or the mean of all, as a PNG.

    python scripts/plot_attention.py runs/en-de "A man rides a bicycle." --output_file attention.png
    python scripts/plot_attention.py runs/writer "Once upon a time" --output_file a.png --layer 0 --head 3

A row is what one token reads, and sums to 1. An encoder-decoder translates the text first; the picture has a
row for each token that it wrote, over the tokens of the text (--kind cross, its default).
It runs the code beside the weights (`trust_remote_code=True`): draw folders that you trust.

Letters in shapes: H heads, L rows, S columns.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any


try:
    import torch
    import transformers
    from matplotlib import font_manager
    from matplotlib.figure import Figure
    from matplotlib.ft2font import FT2Font
    from transformers import BatchEncoding, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is missing: pip install "hf_transformer_block[train]"') from error


KINDS = {
    "encoder": ("encoder",),
    "decoder": ("decoder",),
    "encoder-decoder": ("cross", "encoder", "decoder"),
}  # the first is the default
LARGEST = 512  # tokens on an axis; of more nobody could read the names
MAX_NEW_TOKENS = 256  # as the family's translation pipeline
CELL, LARGEST_SIDE = 0.26, 14.0  # inches
NAMED = 80  # tokens on an axis before some stay without a name
# those that are installed name the tokens which matplotlib's own font cannot draw
FONTS = (
    "Noto Sans CJK JP",
    "Noto Sans Arabic",
    "Noto Sans Devanagari",
    "WenQuanYi Micro Hei",
    "Arial Unicode MS",
)


@dataclass(frozen=True)
class Attention:
    """Probabilities (L, S), and the tokens of both axes."""

    weights: torch.Tensor
    rows: list[str]
    columns: list[str]
    title: str


def one_line(error: Exception) -> str:
    """Returns the beginning of a library's message."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def find_auto_class(config: PreTrainedConfig) -> str | None:
    """Returns the name of the class of transformers that loads the saved head, None without one."""
    head = next(iter(config.architectures or []), None)
    named = (getattr(config, "auto_map", None) or {}).items()
    return next((auto for auto, path in named if str(path).split(".")[-1] == head), None)


def load_config(folder: Path) -> PreTrainedConfig:
    """Returns a folder's configuration; raises ValueError unless it holds a saved model of the family."""
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} holds no config.json: give a folder that train.py or save_pretrained wrote"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    except Exception as error:  # whatever the folder's code raises
        raise ValueError(
            f"{folder} holds a config.json that cannot be read ({one_line(error)}): save the model again"
        ) from error
    if find_auto_class(config) is None or getattr(config, "architecture", None) not in KINDS:
        raise ValueError(
            f"{folder} holds a model of the type {config.model_type!r}, not of this family: give one that is"
        )
    return config


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Returns a folder's tokenizer; raises ValueError if it has none."""
    try:
        if not (folder / "tokenizer_config.json").is_file():
            raise ValueError("there is no tokenizer_config.json")
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    except Exception as error:  # the reader of tokenizer.json raises nothing more specific
        raise ValueError(
            f"{folder} holds no tokenizer that can be read ({one_line(error)}): save it beside the model"
        ) from error


def load_model(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a folder's model with its head, on the accelerator if there is one; raises ValueError."""
    auto_class = getattr(transformers, find_auto_class(config))
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    try:
        return auto_class.from_pretrained(folder, trust_remote_code=True).eval().to(device)
    except Exception as error:  # missing or broken weights, or whatever the folder's code raises
        raise ValueError(
            f"the model of {folder} cannot be loaded ({one_line(error)}): save it again"
        ) from error


def longest_input(config: PreTrainedConfig) -> int | None:
    """Returns for how many tokens a model has positions, None where there is no limit."""
    has_table = config.position_embedding in ("sinusoidal", "learned")
    return config.max_position_embeddings if has_table else None


def encode(
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    texts: dict[str, str],
    longest: int | None = None,
) -> BatchEncoding:
    """
    Returns the ids and the mask (1, S) of a text, or of a pair of them.

    Args:
        texts: by the names that messages give them.
        longest: tokens that are taken if the model has positions, and the tokenizer room, for as many.

    Raises:
        ValueError: a text is empty, or they are too long.
    """
    lengths = {
        name: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if text.strip()
        else 0
        for name, text in texts.items()
    }
    if empty := [name for name, length in lengths.items() if not length]:
        raise ValueError(f"the {empty[0]} is empty: write something")
    ids = tokenizer(*texts.values(), verbose=False)["input_ids"]
    limits = [longest_input(config), longest, tokenizer.model_max_length]  # the last may be beyond all texts
    limit = min(limit for limit in limits if limit is not None)
    if len(ids) > limit:
        name = max(lengths, key=lengths.__getitem__)
        shown = texts[name][:40]
        raise ValueError(f"{len(ids)} tokens are more than {limit}: shorten the {name} {shown!r}...")
    ids = torch.tensor([ids])
    return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def check_choice(config: PreTrainedConfig, kind: str | None, layer: int, head: int | None) -> str:
    """Returns the kind of attention, a model's default for None; raises ValueError for what it lacks."""
    kinds = KINDS[config.architecture]
    kind = kinds[0] if kind is None else kind
    if kind not in kinds:
        raise ValueError(
            f"--kind {kind}: {config.architecture} models have {' and '.join(kinds)}: leave it out"
        )
    is_decoder = config.architecture == "encoder-decoder" and kind != "encoder"
    layers = config.num_decoder_layers if is_decoder else config.num_hidden_layers
    if not -layers <= layer < layers:
        raise ValueError(
            f"--layer {layer}: there are {layers} layers: give 0 to {layers - 1}, or -1 for the last"
        )
    heads = config.num_attention_heads
    if head is not None and not 0 <= head < heads:
        raise ValueError(
            f"--head {head}: there are {heads} heads: give 0 to {heads - 1}, or none for their mean"
        )
    return kind


def length_options(model: PreTrainedModel) -> dict[str, int]:
    """Returns how long `generate` may write where the generation config of the folder does not say it."""
    settings = model.generation_config
    if settings.max_new_tokens or settings.max_length:
        return {}
    return {"max_new_tokens": min(MAX_NEW_TOKENS, model.config.max_position_embeddings)}


def write(model: PreTrainedModel, inputs: BatchEncoding) -> torch.Tensor:
    """Returns what an encoder-decoder writes (1, L + 1); raises ValueError if it cannot."""
    if not model.can_generate():
        raise ValueError(f"{type(model).__name__} has no head that writes: save the model with one")
    return model.generate(**inputs, **length_options(model))[:1]


@torch.no_grad()
def probabilities(
    model: PreTrainedModel, kind: str, inputs: BatchEncoding, written: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Returns the probabilities (H, L, S) of every layer, as the eager attention computes them."""
    decoder_inputs = {} if written is None else {"decoder_input_ids": written[:, :-1], "use_cache": False}
    outputs = model(**inputs, **decoder_inputs, output_attentions=True)
    attentions = outputs["attentions" if written is None else f"{kind}_attentions"]
    return tuple(attention[0].float() for attention in attentions)


def name_tokens(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> list[str]:
    """Returns tokens as people read them; those that are a part of a character as they are stored."""
    names = []
    for token_id in ids.tolist():
        text = tokenizer.decode([token_id])
        stored = not text or "\N{REPLACEMENT CHARACTER}" in text
        names.append(str(tokenizer.convert_ids_to_tokens(token_id)) if stored else text)
    return [name.replace(" ", "\N{OPEN BOX}").replace("\n", "\\n").replace("\t", "\\t") for name in names]


def read_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: BatchEncoding,
    written: torch.Tensor | None = None,
    *,
    kind: str | None = None,
    layer: int = -1,
    head: int | None = None,
) -> Attention:
    """
    Returns the attention of a layer.

    Args:
        inputs: what `encode` gave.
        written: of an encoder-decoder, what `write` gave.
        kind: "cross", "encoder" or "decoder"; None is the default of the model's shape.
        layer: counted from 0, or from the end as -1.
        head: counted from 0; None is the mean of all.

    Raises:
        ValueError: the model has no such layer or head, or there are more tokens than a picture can name.
    """
    kind = check_choice(model.config, kind, layer, head)
    texts = [inputs["input_ids"]] if written is None else [inputs["input_ids"], written]
    if (longest := max(ids.shape[1] for ids in texts)) > LARGEST:
        raise ValueError(f"{longest} tokens are more than a picture can show, {LARGEST}: shorten the text")
    layers = probabilities(model, kind, inputs, written)
    attention = layers[layer]
    heads = len(attention)
    source = name_tokens(tokenizer, inputs["input_ids"][0])
    columns, rows = source, source
    if written is not None and kind != "encoder":
        rows = name_tokens(tokenizer, written[0, 1:])
        columns = source if kind == "cross" else name_tokens(tokenizer, written[0, :-1])
    which = f"mean of {heads} heads" if head is None else f"head {head}"
    weights = attention.mean(dim=0) if head is None else attention[head]
    return Attention(weights, rows, columns, f"{kind} attention, layer {layer % len(layers)}, {which}")


def drawable(names: list[str], fonts: list[FT2Font]) -> list[str]:
    """Returns names in which characters that no font has are given by their code."""
    missing = {
        character
        for character in set("".join(names))
        if not any(font.get_char_index(ord(character)) for font in fonts)
    }
    table = {ord(character): f"U+{ord(character):04X}" for character in missing}
    return [name.translate(table) for name in names]


def draw(attention: Attention) -> Figure:
    """Returns a heat map: rows are the tokens that read, columns those that they read."""
    sides = [len(attention.columns), len(attention.rows)]
    width, height = (min(max(CELL * side, 2.5), LARGEST_SIDE) + 1.8 for side in sides)
    figure = Figure(
        figsize=(width + 0.8, height), layout="constrained"
    )  # pyplot's would be shared by threads
    axes = figure.add_subplot()
    image = axes.imshow(attention.weights.cpu().numpy(), cmap="viridis", vmin=0, aspect="auto")
    figure.colorbar(image, ax=axes, label="probability")
    installed = {*font_manager.get_font_names()}
    families = ["DejaVu Sans", *(font for font in FONTS if font in installed)]
    fonts = [font_manager.get_font(font_manager.findfont(family)) for family in families]
    axes.xaxis.tick_top()  # first, for labels that do not show take no properties
    axes.tick_params(axis="x", rotation=90)
    look = {"fontfamily": families, "parse_math": False}  # a price in dollars is no formula
    for axis, names in ((axes.xaxis, attention.columns), (axes.yaxis, attention.rows)):
        step = -(-len(names) // NAMED)
        axis.set_ticks(range(0, len(names), step), drawable(names[::step], fonts), **look)
    axes.set_ylabel("written" if attention.title.startswith("cross") else "reads")
    axes.set_xlabel(attention.title)
    return figure


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="What train.py or save_pretrained left.")
    parser.add_argument("text", help="What the model reads.")
    parser.add_argument(
        "--output_file", type=Path, required=True, help="Where the PNG goes; an older one is replaced."
    )
    parser.add_argument("--layer", type=int, default=-1, help="From 0; -1, the default, is the last.")
    parser.add_argument("--head", type=int, help="From 0; without, the mean of all heads.")
    parser.add_argument(
        "--kind", choices=KINDS["encoder-decoder"], help="Of an encoder-decoder; cross without."
    )
    return parser.parse_args()


def plot(arguments: argparse.Namespace) -> Attention:
    """Writes the picture; raises ValueError, before the weights are read, for what cannot be drawn."""
    output_file = arguments.output_file
    if output_file.suffix.lower() != ".png" or not output_file.absolute().parent.is_dir():
        raise ValueError(f"--output_file {output_file}: give a .png file in a folder that is there")
    config = load_config(arguments.folder)
    choice: dict[str, Any] = {"layer": arguments.layer, "head": arguments.head}
    choice["kind"] = check_choice(config, arguments.kind, **choice)
    tokenizer = load_tokenizer(arguments.folder)
    inputs = encode(tokenizer, config, {"text": arguments.text}, LARGEST)
    model = load_model(arguments.folder, config)
    inputs = inputs.to(model.device)
    written = write(model, inputs) if config.is_encoder_decoder else None
    attention = read_attention(model, tokenizer, inputs, written, **choice)
    draw(attention).savefig(output_file, format="png", dpi=120)
    return attention


def main() -> None:
    arguments = parse_arguments()
    try:
        attention = plot(arguments)
    except (ValueError, OSError) as error:
        raise SystemExit(f"plot_attention.py: {error}") from error
    print(f"{attention.title}: {arguments.output_file}")


if __name__ == "__main__":
    main()
