"""
The tutorial's `SelfAttention` and `TransformerBlock`, exactly, and the way from a stack to a model and back.

Letters in shapes: B batch, L query length, S value and key length, D embed_size, H heads, K = D / H.
"""

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_hf_transformer_block import TransformerBlockConfig
from .modeling_hf_transformer_block import TransformerBlockModel, TransformerBlockPreTrainedModel


class SelfAttention(nn.Module):
    """
    The tutorial's attention: (K, K) projections shared by all heads, scores divided by sqrt(D).

    Called as `(values, keys, query, mask)`: (B, S, D), (B, S, D), (B, L, D) -> (B, L, D). The mask is None or
    broadcasts to (B, H, L, S), in any dtype; 0 hides. A query that may see nothing attends to all S alike.

    Args:
        apply_projections: False for the first text, which creates the three projections but never uses them.

    Raises:
        ValueError: `heads` does not divide `embed_size` (the tutorial's AssertionError), or shapes differ.
    """

    def __init__(self, embed_size: int, heads: int, apply_projections: bool = True):
        super().__init__()
        if heads < 1 or embed_size % heads:
            raise ValueError(f"embed_size={embed_size} is not divisible by heads={heads}; change one of them")
        self.embed_size = embed_size
        self.heads = heads
        self.head_dim = embed_size // heads
        self.apply_projections = apply_projections
        self.values = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.keys = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.queries = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def split(self, projection: nn.Linear, states: torch.Tensor) -> torch.Tensor:
        """Splits into heads and projects each of them: (B, L, D) -> (B, H, L, K)."""
        states = states.unflatten(-1, (self.heads, self.head_dim))
        return (projection(states) if self.apply_projections else states).transpose(1, 2)

    def forward(
        self, values: torch.Tensor, keys: torch.Tensor, query: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if values.shape != keys.shape or keys.shape[0] != query.shape[0]:
            raise ValueError(
                f"values {tuple(values.shape)} and keys {tuple(keys.shape)} must have one shape, and the "
                f"batch size of query {tuple(query.shape)}"
            )
        values, keys = self.split(self.values, values), self.split(self.keys, keys)
        query = self.split(self.queries, query)
        visible = None
        if mask is not None:
            visible = torch.atleast_2d(mask) != 0
            # zeros as a query that sees all: equal scores in every dtype, and no gradient to query and keys
            sees_nothing = ~visible.any(dim=-1, keepdim=True)
            visible = visible | sees_nothing
            query = query.masked_fill(sees_nothing, 0.0)
        out = F.scaled_dot_product_attention(query, keys, values, visible, scale=self.embed_size**-0.5)
        return self.fc_out(out.transpose(1, 2).flatten(2))  # (B, H, L, K) -> (B, L, D)


class TransformerBlock(nn.Module):
    """
    The tutorial's block: x = dropout(norm1(attention + query)), then dropout(norm2(feed_forward(x) + x)).

    Called as `(value, key, query, mask)`; shapes, errors and `apply_projections` as in `SelfAttention`.
    """

    def __init__(
        self,
        embed_size: int,
        heads: int,
        dropout: float,
        forward_expansion: int,
        apply_projections: bool = True,
    ):
        super().__init__()
        self.attention = SelfAttention(embed_size, heads, apply_projections)
        self.norm1 = nn.LayerNorm(embed_size)
        self.norm2 = nn.LayerNorm(embed_size)
        self.feed_forward = nn.Sequential(
            nn.Linear(embed_size, forward_expansion * embed_size),
            nn.ReLU(),
            nn.Linear(forward_expansion * embed_size, embed_size),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, value: torch.Tensor, key: torch.Tensor, query: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        x = self.dropout(self.norm1(self.attention(value, key, query, mask) + query))
        return self.dropout(self.norm2(self.feed_forward(x) + x))


# The parts of a tutorial block, and what a layer of `TransformerBlockModel` calls them.
PARTS = {
    "attention.queries": "self_attn.q_proj",
    "attention.keys": "self_attn.k_proj",
    "attention.values": "self_attn.v_proj",
    "attention.fc_out": "self_attn.o_proj",
    "norm1": "self_attn_norm",
    "feed_forward.0": "mlp.up_proj",
    "feed_forward.2": "mlp.down_proj",
    "norm2": "mlp_norm",
}


def require_tutorial(config: TransformerBlockConfig) -> None:
    """Raises ValueError unless the configuration describes one stack of the tutorial's blocks."""
    if config.intermediate_size % config.hidden_size:
        raise ValueError(
            f"the tutorial's forward_expansion is a whole number, but intermediate_size="
            f"{config.intermediate_size} is no multiple of hidden_size={config.hidden_size}"
        )
    needed = {"block_style": "tutorial", "is_encoder_decoder": False, "gated_mlp": False, "mlp_bias": True}
    needed |= {"hidden_act": "relu", "norm_type": "layer_norm", "qk_norm": False, "attention_dropout": 0}
    needed |= {"rope_parameters": None}
    for name, value in needed.items():
        if (found := getattr(config, name)) != value:
            raise ValueError(f"a stack of the tutorial's blocks has {name}={value!r}, not {found!r}")


def describe(blocks: Sequence[nn.Module]) -> dict[str, int | float]:
    """Returns the configuration fields of a stack of tutorial blocks; raises ValueError if it is none."""
    if not blocks:
        raise ValueError("there are no blocks to convert; give at least one")
    fields = []
    for index, block in enumerate(blocks):
        parts = dict(block.named_modules(remove_duplicate=False)) if isinstance(block, nn.Module) else {}
        if missing := [part for part in (*PARTS, "dropout") if part not in parts]:
            kind = f"block {index} ({type(block).__name__})"
            raise ValueError(f"{kind} is not the tutorial's: it has no {', '.join(missing)}")
        hidden_size, query_size = parts["attention.fc_out"].weight.shape
        fields.append(
            {
                "hidden_size": hidden_size,
                "num_attention_heads": query_size // parts["attention.queries"].weight.shape[0],
                "intermediate_size": parts["feed_forward.0"].weight.shape[0],
                "dropout": parts["dropout"].p,
                "norm_eps": parts["norm1"].eps,
            }
        )
        if fields[index] != fields[0]:
            raise ValueError(f"blocks must be alike: block {index} has {fields[index]}, block 0 {fields[0]}")
    return {"num_hidden_layers": len(fields), **fields[0]}


@torch.no_grad()
def copy_block(block: nn.Module, layer: nn.Module, index: int) -> None:
    """
    Copies a block into a layer (float64, eval mode); raises ValueError unless both then compute the same.

    A block which only identity matrices reproduce is of the first text, which does not apply its projections.
    """
    block = copy.deepcopy(block).to("cpu", torch.float64).eval()
    for part, ours in PARTS.items():
        layer.get_submodule(ours).load_state_dict(block.get_submodule(part).state_dict())
    shape = (4, 8, block.norm1.weight.shape[0])
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = block(states, states, states, None)[:, -1]  # the last token sees all, in a decoder too
    if torch.allclose(layer(states)[:, -1], expected, rtol=0, atol=1e-6):
        return
    for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
        nn.init.eye_(projection.weight)
    if not torch.allclose(layer(states)[:, -1], expected, rtol=0, atol=1e-6):
        raise ValueError(
            f"block {index} ({type(block).__name__}) has the tutorial's parts, but computes something else: "
            f"compare its forward with {__name__}.TransformerBlock"
        )


def copy_table(table: nn.Embedding, ours: nn.Embedding, name: str) -> None:
    """Copies a table of embeddings; raises ValueError if the blocks have another width."""
    if table.embedding_dim != ours.embedding_dim:
        raise ValueError(f"{name} is {table.embedding_dim} wide, but the blocks are {ours.embedding_dim}")
    ours.load_state_dict(table.state_dict())


def to_model(
    blocks: Sequence[nn.Module],
    embed_tokens: nn.Embedding | None = None,
    embed_positions: nn.Embedding | None = None,
    **config,
) -> TransformerBlockModel:
    """
    Returns a model that computes what a stack of tutorial blocks does, ours or a learner's own classes.

    `model(inputs_embeds=x)` is `x = block(x, x, x, mask)` for each block in turn, `attention_mask` (B, L) for
    a mask (B, 1, 1, L); only a query that may see nothing differs: its attention is zero. Dtype, device and
    mode are the first block's. In training the model drops out embeddings too.

    Args:
        embed_tokens: the token table, for `model(input_ids)`; None: a new one of `vocab_size` tokens.
        embed_positions: the table of learned positions, counted over the real tokens of an `attention_mask`
            unless `position_ids` are given; None: no positions.
        config: other fields of `TransformerBlockConfig`, such as `architecture` ("decoder": under a causal
            mask), `vocab_size` or the special tokens (None unless given).

    Raises:
        ValueError: the blocks are not the tutorial's or not alike, or something else does not fit them.
    """
    fields = {**describe(blocks), "position_embedding": "none"}
    if embed_tokens is not None:
        fields["vocab_size"] = embed_tokens.num_embeddings
    elif "vocab_size" not in config:
        raise ValueError("give embed_tokens, the token table, or vocab_size, the size of a new one")
    if embed_positions is not None:
        fields["position_embedding"] = "learned"
        fields["max_position_embeddings"] = embed_positions.num_embeddings
    special_tokens = {"pad_token_id": getattr(embed_tokens, "padding_idx", None)}
    special_tokens |= {"bos_token_id": None, "eos_token_id": None}
    config = TransformerBlockConfig.tutorial(**{**special_tokens, **config}, **fields)
    require_tutorial(config)

    model = TransformerBlockModel(config).double().eval()
    for index, (block, layer) in enumerate(zip(blocks, model.layers, strict=True)):
        copy_block(block, layer, index)
    for name, table in (("embed_tokens", embed_tokens), ("embed_positions", embed_positions)):
        if table is not None:
            copy_table(table, model.get_submodule(name), name)
    first = blocks[0].norm1.weight
    return model.to(first.device, first.dtype).train(blocks[0].training)


def from_model(model: TransformerBlockPreTrainedModel) -> list[TransformerBlock]:
    """
    Returns copies of a tutorial-style model's layers, with or without a head, as tutorial blocks.

    Raises:
        ValueError: the model is not one stack of the tutorial's blocks; the message names the field.
    """
    config, blocks = model.config, []
    require_tutorial(config)
    expansion = config.intermediate_size // config.hidden_size
    for layer in model.base_model.layers:
        block = TransformerBlock(config.hidden_size, config.num_attention_heads, config.dropout, expansion)
        block.norm1.eps = block.norm2.eps = config.norm_eps
        block.to(model.device, model.dtype).train(model.training)
        for part, ours in PARTS.items():
            block.get_submodule(part).load_state_dict(layer.get_submodule(ours).state_dict())
        blocks.append(block)
    return blocks
