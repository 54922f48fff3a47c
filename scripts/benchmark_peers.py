"""Ours and the peers of scripts/benchmark.py: models of one shape, and what each of them is asked to do."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from ctranslate2 import Translator
from ctranslate2.converters.transformers import MarianMTLoader
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    CompileConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

from hf_transformer_block import (
    TransformerBlockConfig,
    TransformerBlockForMaskedLM,
    TransformerBlockModel,
)
from hf_transformer_block.convert import convert
from hf_transformer_block.export_ctranslate2 import save_spec


Run = Callable[[], object]
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of what it reads: `batch` rows of `length` tokens."""

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    batch: int
    length: int

    def tokens(self, device: str) -> torch.Tensor:
        """Returns random token ids (B, L), none of them special."""
        return torch.randint(3, self.vocabulary, (self.batch, self.length), device=device)


def gpt2(shape: Shape) -> PreTrainedModel:
    sizes = {"n_embd": shape.width, "n_layer": shape.layers, "n_head": shape.heads, "n_inner": shape.inner}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    positions = max(2048, shape.length)
    config = GPT2Config(vocab_size=shape.vocabulary, n_positions=positions, **sizes, **no_dropout, **SPECIAL)
    return GPT2LMHeadModel(config)


def llama(shape: Shape) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.inner * 2 // 3 // 16 * 16,  # three matrices instead of two
        max_position_embeddings=max(2048, shape.length),
        tie_word_embeddings=True,
        **SPECIAL,
    )
    return LlamaForCausalLM(config)


def marian(shape: Shape) -> PreTrainedModel:
    config = MarianConfig(
        vocab_size=shape.vocabulary,
        d_model=shape.width,
        encoder_layers=shape.layers,
        decoder_layers=shape.layers,
        encoder_attention_heads=shape.heads,
        decoder_attention_heads=shape.heads,
        encoder_ffn_dim=shape.inner,
        decoder_ffn_dim=shape.inner,
        max_position_embeddings=512,
        activation_function="relu",
        scale_embedding=True,
        dropout=0.1,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        **SPECIAL,
    )
    return MarianMTModel(config)


def bert(shape: Shape) -> PreTrainedModel:
    config = BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.inner,
        max_position_embeddings=512,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )
    return BertForMaskedLM(config)


def our_encoder(shape: Shape) -> PreTrainedModel:
    """Returns BERT's shape in our classes; BERT's output layer has a product and a norm more."""
    config = TransformerBlockConfig(
        architecture="encoder",
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.inner,
        hidden_act="gelu",
        position_embedding="learned",
        max_position_embeddings=512,
        dropout=0.0,
    )
    return TransformerBlockForMaskedLM(config)


class TorchEncoder(nn.Module):
    """torch.nn.TransformerEncoder between an embedding and a tied output projection."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        layer = nn.TransformerEncoderLayer(
            shape.width, shape.heads, shape.inner, 0.0, "gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, shape.layers)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden_states = self.encoder(self.embed_tokens(input_ids))
        logits = F.linear(hidden_states, self.embed_tokens.weight)
        return {"loss": F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())}


class XTransformers(nn.Module):
    """The decoder of x-transformers with rotary positions and tied embeddings."""

    def __init__(self, shape: Shape):
        super().__init__()
        layers = Decoder(
            dim=shape.width,
            depth=shape.layers,
            heads=shape.heads,
            attn_dim_head=shape.width // shape.heads,
            ff_mult=shape.inner / shape.width,
            rotary_pos_emb=True,
            attn_flash=True,
        )
        self.model = AutoregressiveWrapper(
            TransformerWrapper(
                num_tokens=shape.vocabulary,
                max_seq_len=max(2048, shape.length),
                attn_layers=layers,
                tie_embedding=True,
                use_abs_pos_emb=False,
            )
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(input_ids)}


def train_step(model: nn.Module, shape: Shape, device: str, dtype: torch.dtype) -> Run:
    """Returns forward, backward and AdamW's update of a batch, mixed in half precision, compiled on a GPU."""
    model = model.to(device).train()
    model = torch.compile(model) if device == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = shape.tokens(device)

    def step() -> None:
        mixed = torch.autocast(device, dtype) if dtype != torch.float32 else contextlib.nullcontext()
        with mixed:
            loss = model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def products(shape: Shape, device: str, dtype: torch.dtype, is_pair: bool = False) -> Run:
    """
    Returns the bare matrix products of a training step: the limit of any program of this shape.

    Three for every weight (forward, and two gradients) and for attention's two products; no more than that.
    """
    rows, width, head = shape.batch * shape.length, shape.width, shape.width // shape.heads
    attentions = shape.layers * (3 if is_pair else 1)
    sizes = [(rows, width, width)] * (4 * attentions)
    sizes += [(rows, width, shape.inner), (rows, shape.inner, width)] * (shape.layers * (1 + is_pair))
    sizes += [(rows, width, shape.vocabulary)]
    operands = {size: product_operands(*size, device, dtype) for size in set(sizes)}
    heads = (shape.batch * shape.heads, shape.length, head)
    query, key = (torch.randn(heads, device=device, dtype=dtype) for _ in range(2))
    scores = torch.randn(*heads[:2], shape.length, device=device, dtype=dtype)

    def step() -> None:
        for size in sizes:
            inputs, weight, outputs = operands[size]
            inputs @ weight, outputs @ weight.t(), inputs.t() @ outputs
        for _ in range(attentions):
            query @ key.mT, scores @ key, scores.mT @ query
            scores @ query, query @ key.mT, scores.mT @ key

    return step


def products_of_tokens(shape: Shape, device: str, new_tokens: int) -> Run:
    """Returns the bare products with the weights of a decoder, once for every token that it writes."""
    layer = [(shape.width, shape.width)] * 4 + [(shape.width, shape.inner), (shape.inner, shape.width)]
    sizes = layer * shape.layers + [(shape.width, shape.vocabulary)]
    inputs = {size: torch.randn(shape.batch, size, device=device) for size in {inner for inner, _ in sizes}}
    weights = [torch.randn(outputs, inner, device=device) for inner, outputs in sizes]

    def write() -> None:
        for _ in range(new_tokens):
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

    return write


def product_operands(
    rows: int, inputs: int, outputs: int, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns inputs (N, I), weight (I, O) and outputs (N, O)."""
    shapes = (rows, inputs), (inputs, outputs), (rows, outputs)
    return tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


def generate(model: PreTrainedModel, shape: Shape, device: str, new_tokens: int, **settings) -> Run:
    """Returns the writing of `new_tokens` tokens behind every row, through transformers' `generate`."""
    model, ids = model.to(device).eval(), shape.tokens(device)
    mask = torch.ones_like(ids)
    model.generation_config.eos_token_id = None  # all of them write to the end
    settings = {"max_new_tokens": new_tokens, "do_sample": False, **settings}
    return lambda: model.generate(input_ids=ids, attention_mask=mask, **settings)


def compiled() -> dict:
    """Returns the settings of `generate` for a compiled step with a static cache, on any device."""
    config = CompileConfig(fullgraph=True, dynamic=False, mode=None, options={"cpp_wrapper": True})
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def ctranslate2_of_marian(shape: Shape) -> tempfile.TemporaryDirectory:
    """Returns the folder of a Marian, made by CTranslate2's own converter."""
    model, folder = marian(shape), tempfile.TemporaryDirectory()
    spec = MarianMTLoader().get_model_spec(model)
    tokens = words(shape)[:-1]  # the converter takes off the last row, a Marian's padding
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.eos_token = spec.config.decoder_start_token = "w2"
    spec.config.unk_token = spec.config.bos_token = "w1"
    spec.validate()
    spec.optimize()
    spec.save(folder.name)
    return folder


def ctranslate2_of_ours(shape: Shape) -> tempfile.TemporaryDirectory:
    """Returns the folder that scripts/export.py makes of the same Marian as a model of ours."""
    vocabulary = {word: number for number, word in enumerate(words(shape))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w1"))
    names = {"pad_token": "w0", "bos_token": "w1", "unk_token": "w1", "eos_token": "w2"}
    folder = tempfile.TemporaryDirectory()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    save_spec(convert(marian(shape)), fast, Path(folder.name), "float32")
    return folder


def words(shape: Shape) -> list[str]:
    return [f"w{number}" for number in range(shape.vocabulary)]


def translate_by_ctranslate2(
    folder: tempfile.TemporaryDirectory, shape: Shape, device: str, new_tokens: int, num_beams: int
) -> Run:
    """Returns a translation of every row to `new_tokens` tokens by CTranslate2, in float32."""
    translator = Translator(folder.name, device=device, intra_threads=torch.get_num_threads())
    sources = [[f"w{token}" for token in row] for row in shape.tokens("cpu").tolist()]
    lengths = {"min_decoding_length": new_tokens, "max_decoding_length": new_tokens}
    return lambda: translator.translate_batch(sources, beam_size=num_beams, **lengths)


def prefill(model: PreTrainedModel, shape: Shape, device: str) -> Run:
    """Returns the reading of a prompt: its cache, and the logits of its last token."""
    model, ids = model.to(device).eval(), shape.tokens(device)

    @torch.no_grad()
    def run() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return run


def our_block(shape: Shape, device: str) -> Run:
    """Returns forward and backward of one block of ours, as the tutorial uses its own."""
    config = TransformerBlockConfig.tutorial(
        hidden_size=shape.width,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        intermediate_size=shape.inner,
        dropout=0.0,
        position_embedding="none",
        vocab_size=8,
    )
    model = TransformerBlockModel(config).to(device).train()
    inputs = torch.randn(shape.batch, shape.length, shape.width, device=device)
    return lambda: model(inputs_embeds=inputs).last_hidden_state.sum().backward()


class TutorialBlock(nn.Module):
    """The block of the tutorials, by their formulas: all scores (B, H, L, L) exist at once."""

    def __init__(self, width: int, heads: int, expansion: int):
        super().__init__()
        self.heads, self.width = heads, width
        head = width // heads
        self.values, self.keys, self.queries = (nn.Linear(head, head, bias=False) for _ in range(3))
        self.fc_out = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, expansion * width), nn.ReLU(), nn.Linear(expansion * width, width)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        split = inputs.reshape(*inputs.shape[:2], self.heads, -1)
        values, keys, queries = self.values(split), self.keys(split), self.queries(split)
        energy = torch.einsum("nqhd,nkhd->nhqk", queries, keys)
        attention = torch.softmax(energy / self.width**0.5, dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", attention, values).reshape(inputs.shape)
        out = self.norm1(self.fc_out(out) + inputs)
        return self.norm2(self.feed_forward(out) + out)


def tutorial_block(shape: Shape, device: str) -> Run:
    block = TutorialBlock(shape.width, shape.heads, shape.inner // shape.width).to(device).train()
    inputs = torch.randn(shape.batch, shape.length, shape.width, device=device)
    return lambda: block(inputs).sum().backward()


def load(model: PreTrainedModel) -> Run:
    """Returns the loading of a saved folder by AutoModelForCausalLM; our code comes from the folder."""
    folder = tempfile.TemporaryDirectory()
    model.save_pretrained(folder.name)

    return lambda: AutoModelForCausalLM.from_pretrained(folder.name, trust_remote_code=True)


def ours(peer: PreTrainedModel) -> PreTrainedModel:
    """Returns a peer as a model of ours with the same weights."""
    return convert(peer)


def importing(statement: str) -> Run:
    """Returns the start of a new Python that runs one import."""
    return lambda: subprocess.run([sys.executable, "-c", statement], check=True)
