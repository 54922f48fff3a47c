"""
Models of the family as ONNX graphs of any batch and length: one for a stack, two for an encoder-decoder.

Every graph is run by onnxruntime on other shapes than it was traced with, and its values are compared. There
is no cache of keys and values: a graph that writes takes the whole text again for each new token.

Letters in shapes: B batch, L target length, S source length, D hidden.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnxruntime
import torch
from torch import nn
from torch.export import Dim
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .convert import TOLERANCE
from .folders import save_tokenizer
from .modeling_hf_transformer_block import TransformerBlockForQuestionAnswering, TransformerBlockModel


LARGEST_FILE = 1_500_000_000  # bytes; a file of ONNX ends at 2 GB, so more weights lie beside it
BATCH, SOURCE, TARGET = Dim("batch"), Dim("length"), Dim("target_length")
SHAPES = {
    "input_ids": {0: BATCH, 1: SOURCE},
    "attention_mask": {0: BATCH, 1: SOURCE},
    "decoder_input_ids": {0: BATCH, 1: TARGET},
    "encoder_hidden_states": {0: BATCH, 1: SOURCE},
    "encoder_attention_mask": {0: BATCH, 1: SOURCE},
}


@dataclass(frozen=True)
class Comparison:
    """
    What onnxruntime computed with a graph, beside the model.

    Attributes:
        difference: largest difference of the outputs.
        largest: largest absolute value of the outputs.
    """

    difference: float
    largest: float


def output_names(model: PreTrainedModel) -> list[str]:
    """Returns what a class computes, by the names which transformers gives it."""
    if isinstance(model, TransformerBlockForQuestionAnswering):
        return ["start_logits", "end_logits"]
    return ["last_hidden_state"] if isinstance(model, TransformerBlockModel) else ["logits"]


class StackGraph(nn.Module):
    """One stack with its head: tokens and mask (B, S) to what the class computes."""

    inputs = ("input_ids", "attention_mask")

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.outputs = output_names(model)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return tuple(outputs[name] for name in self.outputs)


class EncoderGraph(StackGraph):
    """The encoder of a pair: tokens and mask (B, S) to hidden states (B, S, D)."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model.base_model.encoder)
        self.outputs = ["last_hidden_state"]


class DecoderGraph(StackGraph):
    """The decoder of a pair with its head: tokens (B, L), the encoder's states (B, S, D) and mask (B, S)."""

    inputs = ("decoder_input_ids", "encoder_hidden_states", "encoder_attention_mask")

    def forward(
        self,
        decoder_input_ids: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        outputs = self.model(
            decoder_input_ids=decoder_input_ids,
            encoder_outputs=(encoder_hidden_states,),
            attention_mask=encoder_attention_mask,
            use_cache=False,
        )
        return tuple(outputs[name] for name in self.outputs)


def require_static_rotation(model: PreTrainedModel) -> None:
    """Raises ValueError for positions that change with the length of the text, which no graph can."""
    rope = model.config.rope_parameters or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise ValueError(
            f"rope_type={rope['rope_type']!r} turns by other angles in longer texts, and a graph has one set "
            f"of them; serve it with transformers, or train it with another rope_type"
        )


def draw_inputs(model: PreTrainedModel, batch: int, source: int, target: int) -> dict[str, torch.Tensor]:
    """Returns random inputs of every kind of graph; the second row and those after it end in padding."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    source, target = (min(length, config.max_position_embeddings) for length in (source, target))
    lengths = (source - torch.arange(batch)).clamp(min=1)
    mask = (torch.arange(source) < lengths[:, None]).long()
    return {
        "input_ids": torch.randint(config.vocab_size, (batch, source), generator=generator),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(config.vocab_size, (batch, target), generator=generator),
        "encoder_hidden_states": torch.randn(batch, source, config.hidden_size, generator=generator),
        "encoder_attention_mask": mask,
    }


@torch.no_grad()
def write_graph(graph: StackGraph, model: PreTrainedModel, file: Path) -> None:
    """Traces a graph and writes it, with its weights inside if they fit into one file."""
    inputs = draw_inputs(model, batch=2, source=7, target=5)
    size = sum(weight.nbytes for weight in graph.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about its own parts and about names that inputs share
        torch.onnx.export(
            graph.eval(),
            tuple(inputs[name] for name in graph.inputs),
            file,
            dynamo=True,
            input_names=list(graph.inputs),
            output_names=graph.outputs,
            dynamic_shapes=tuple(SHAPES[name] for name in graph.inputs),
            external_data=size > LARGEST_FILE,
            verbose=False,
        )


@torch.no_grad()
def compare(graph: StackGraph, model: PreTrainedModel, file: Path) -> Comparison:
    """Compares onnxruntime's values with the model's, in shapes that were not traced."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    difference, largest = 0.0, 0.0
    for batch, source, target in ((3, 11, 4), (1, 1, 1)):
        inputs = draw_inputs(model, batch, source, target)
        inputs = {name: inputs[name] for name in graph.inputs}
        theirs = session.run(graph.outputs, {name: tensor.numpy() for name, tensor in inputs.items()})
        for mine, value in zip(graph(*inputs.values()), theirs, strict=True):
            difference = max(difference, float((mine - torch.from_numpy(value)).abs().max()))
            largest = max(largest, float(mine.abs().max()))
    return Comparison(difference, largest)


@contextmanager
def attending_by_sdpa(model: PreTrainedModel) -> Iterator[None]:
    """Has a model attend by the function that torch can trace, and gives it its own back whatever happens."""
    backend = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(backend)


def write_checked(graph: StackGraph, model: PreTrainedModel, file: Path) -> Comparison:
    """Writes a graph and returns how equal it is; raises ValueError as `export` says."""
    try:
        write_graph(graph, model, file)
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).split("\n")[0]
        raise ValueError(
            f"torch {torch.__version__} cannot make {file.name} of this model: {reason}"
        ) from error
    found = compare(graph, model, file)
    if not found.difference <= TOLERANCE * found.largest:
        raise ValueError(
            f"onnxruntime {onnxruntime.__version__} computes something else: values of {file.name} differ by "
            f"{found.difference:.3g}, where the largest is {found.largest:.3g}; try another version"
        )
    return found


def write_config(model: PreTrainedModel, file: Path) -> None:
    """Writes labels, special tokens and sizes, for whoever reads them; no code of ours stands beside them."""
    config = model.config.to_dict()
    for name in ("_name_or_path", "auto_map", "custom_pipelines", "model_type"):
        config.pop(name, None)
    file.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False), encoding="utf-8")


def export(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> dict[str, Comparison]:
    """
    Writes model.onnx, or encoder.onnx and decoder.onnx, into a folder; returns how equal each file is.

    Args:
        model: in float32, for evaluation, of any class of the family.
        tokenizer: saved along, with config.json.
        folder: an empty one.

    Raises:
        ValueError: the model cannot become a graph, or onnxruntime got other numbers.
    """
    require_static_rotation(model)
    if model.config.is_encoder_decoder:
        graphs = {"encoder.onnx": EncoderGraph(model), "decoder.onnx": DecoderGraph(model)}
    else:
        graphs = {"model.onnx": StackGraph(model)}
    with attending_by_sdpa(model):
        comparisons = {name: write_checked(graph, model, folder / name) for name, graph in graphs.items()}
    write_config(model, folder / "config.json")
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    return comparisons
