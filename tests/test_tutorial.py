"""Tests of the tutorial's block against the tutorial's own code, and of its way into a model and back."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoModelForMaskedLM

from hf_transformer_block import TransformerBlockConfig, TransformerBlockForMaskedLM, TransformerBlockModel
from hf_transformer_block.tutorial import SelfAttention, TransformerBlock, from_model, to_model


class FirstSelfAttention(nn.Module):
    """The first text's code, comments left out."""

    def __init__(self, embed_size, heads):
        super().__init__()
        self.embed_size = embed_size
        self.heads = heads
        self.head_dim = embed_size // heads

        assert self.head_dim * heads == embed_size, "Embed size needs to be divisible by heads"

        self.values = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.keys = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.queries = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.fc_out = nn.Linear(heads * self.head_dim, embed_size)

    def forward(self, values, keys, query, mask):
        N = query.shape[0]

        values = values.reshape(N, -1, self.heads, self.head_dim)
        keys = keys.reshape(N, -1, self.heads, self.head_dim)
        query = query.reshape(N, -1, self.heads, self.head_dim)

        energy = torch.einsum("nqhd,nkhd->nhqk", [query, keys])
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))

        attention = torch.softmax(energy / (self.embed_size ** (1 / 2)), dim=3)

        out = torch.einsum("nhql,nlhd->nqhd", [attention, values]).reshape(N, -1, self.heads * self.head_dim)

        return self.fc_out(out)


class SecondSelfAttention(nn.Module):
    """The second text's code, comments left out."""

    def __init__(self, embed_size, heads):
        super().__init__()
        self.embed_size = embed_size
        self.heads = heads
        self.head_dim = embed_size // heads

        assert self.head_dim * heads == embed_size, "Embedding size needs to be divisible by heads"

        self.values = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.keys = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.queries = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.fc_out = nn.Linear(heads * self.head_dim, embed_size)

    def forward(self, values, keys, query, mask):
        N = query.shape[0]
        value_len, key_len, query_len = values.shape[1], keys.shape[1], query.shape[1]

        values = values.reshape(N, value_len, self.heads, self.head_dim)
        keys = keys.reshape(N, key_len, self.heads, self.head_dim)
        queries = query.reshape(N, query_len, self.heads, self.head_dim)

        values = self.values(values)
        keys = self.keys(keys)
        queries = self.queries(queries)

        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])

        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))

        attention = torch.softmax(energy / (self.embed_size ** (1 / 2)), dim=3)

        out = torch.einsum("nhql,nlhd->nqhd", [attention, values]).reshape(
            N, query_len, self.heads * self.head_dim
        )

        return self.fc_out(out)


class SecondTransformerBlock(nn.Module):
    """The second text's code, comments left out."""

    def __init__(self, embed_size, heads, dropout, forward_expansion):
        super().__init__()
        self.attention = SecondSelfAttention(embed_size, heads)
        self.norm1 = nn.LayerNorm(embed_size)
        self.norm2 = nn.LayerNorm(embed_size)

        self.feed_forward = nn.Sequential(
            nn.Linear(embed_size, forward_expansion * embed_size),
            nn.ReLU(),
            nn.Linear(forward_expansion * embed_size, embed_size),
        )

        self.dropout = nn.Dropout(dropout)

    def forward(self, value, key, query, mask):
        attention = self.attention(value, key, query, mask)

        x = self.dropout(self.norm1(attention + query))
        forward = self.feed_forward(x)
        return self.dropout(self.norm2(forward + x))


class FirstTransformerBlock(SecondTransformerBlock):
    """The second text's block around the first text's attention."""

    def __init__(self, embed_size, heads, dropout, forward_expansion):
        super().__init__(embed_size, heads, dropout, forward_expansion)
        self.attention = FirstSelfAttention(embed_size, heads)


class GeluBlock(SecondTransformerBlock):
    """A block that a learner has changed."""

    def __init__(self, *args):
        super().__init__(*args)
        self.feed_forward[1] = nn.GELU()


BATCH, TARGET, SOURCE, SIZE, HEADS, VOCAB = 3, 5, 7, 32, 4, 20
BLOCKS = {True: SecondTransformerBlock, False: FirstTransformerBlock}
ATTENTIONS = {True: SecondSelfAttention, False: FirstSelfAttention}
MASKS = {
    "none": None,
    "padding": torch.arange(SOURCE).lt(torch.tensor([[7], [2], [5]]))[:, None, None].long(),
    "padding-bool": torch.arange(SOURCE).lt(torch.tensor([[7], [2], [5]]))[:, None, None],
    "padding-float": torch.arange(SOURCE).lt(torch.tensor([[7], [2], [5]]))[:, None, None].float(),
    "causal": torch.ones(1, 1, TARGET, SOURCE).tril().int(),
    "causal-2d": torch.ones(TARGET, SOURCE).tril(),
    "one-row": torch.arange(SOURCE).lt(4),
    "blind-example": torch.tensor([1, 0, 1])[:, None, None, None].expand(BATCH, 1, 1, SOURCE),
    "blind-queries": torch.ones(1, 1, TARGET, SOURCE).tril(diagonal=-2).bool(),
    "blind-narrow": torch.arange(TARGET).lt(torch.tensor([[5], [2], [3]]))[:, None, :, None],
    "per-head": torch.rand(BATCH, HEADS, TARGET, SOURCE, generator=torch.Generator().manual_seed(0)).gt(0.7),
}
either_text = pytest.mark.parametrize("applied", [True, False], ids=["second", "first"])
any_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())


def spread(module):
    """Moves every weight off its initial value, so that norms and biases matter."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module.eval()


def pair(applied, dtype=torch.float32):
    """The tutorial's block and ours with the same weights."""
    theirs = spread(BLOCKS[applied](SIZE, HEADS, 0.1, 4)).to(dtype)
    ours = TransformerBlock(SIZE, HEADS, 0.1, 4, apply_projections=applied).to(dtype).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def example(dtype=torch.float32):
    """Values, keys and query of different lengths, wanting gradients."""
    shapes = [(BATCH, SOURCE, SIZE), (BATCH, SOURCE, SIZE), (BATCH, TARGET, SIZE)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def gradients(block, inputs, mask):
    """The gradients of inputs and parameters, None where there is no path."""
    output = block(*inputs, mask)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    wanted = {"value": inputs[0], "key": inputs[1], "query": inputs[2], **dict(block.named_parameters())}
    found = torch.autograd.grad((output * weights).sum(), list(wanted.values()), allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def stack(cls=SecondTransformerBlock, depth=3, size=SIZE, heads=HEADS, dropout=0.1):
    return nn.ModuleList([spread(cls(size, heads, dropout, 2)) for _ in range(depth)])


def apply(blocks, states, mask):
    for block in blocks:
        states = block(states, states, states, mask)
    return states


def test_the_second_texts_example():
    theirs = SecondTransformerBlock(embed_size=256, heads=8, dropout=0.1, forward_expansion=4).eval()
    ours = TransformerBlock(embed_size=256, heads=8, dropout=0.1, forward_expansion=4).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    values = torch.rand((64, 50, 256))
    keys = torch.rand((64, 50, 256))
    query = torch.rand((64, 50, 256))
    mask = None
    with torch.no_grad():
        out = ours(values, keys, query, mask)
        assert out.shape == query.shape
        assert_close(out, theirs(values, keys, query, mask), atol=1e-6, rtol=1e-6)


@either_text
@any_mask
def test_block_equals_the_tutorials(applied, mask):
    theirs, ours = pair(applied)
    inputs = example()
    assert_close(ours(*inputs, mask), theirs(*inputs, mask), atol=1e-6, rtol=1e-6)


@either_text
@any_mask
def test_attention_equals_the_tutorials(applied, mask):
    theirs = spread(ATTENTIONS[applied](SIZE, HEADS))
    ours = SelfAttention(SIZE, HEADS, apply_projections=applied)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    inputs = example()
    assert_close(ours(*inputs, mask), theirs(*inputs, mask), atol=1e-6, rtol=1e-6)


@either_text
@any_mask
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 4e-6), (torch.float64, 1e-14)], ids=str)
def test_gradients_equal_the_tutorials(applied, mask, dtype, tolerance):
    theirs, ours = pair(applied, dtype)
    inputs = example(dtype)
    expected = gradients(theirs, inputs, mask)
    found = gradients(ours, inputs, mask)
    unused = [name for name, gradient in expected.items() if gradient is None]
    assert len(unused) == (0 if applied else 3)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@either_text
def test_a_seed_gives_the_tutorials_weights_and_its_dropout(applied):
    torch.manual_seed(1)
    theirs = SecondTransformerBlock(SIZE, HEADS, 0.3, 4)
    torch.manual_seed(1)
    ours = TransformerBlock(SIZE, HEADS, 0.3, 4, apply_projections=applied)
    assert_close(ours.state_dict(), theirs.state_dict(), atol=0, rtol=0)
    if not applied:
        theirs.attention.__class__ = FirstSelfAttention
    inputs = example()
    torch.manual_seed(2)
    expected = theirs(*inputs, MASKS["padding"])
    torch.manual_seed(2)
    found = ours(*inputs, MASKS["padding"])
    assert (found == 0).any()
    assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.08), (torch.bfloat16, 0.16)], ids=str)
@either_text
@any_mask
def test_half_precision_is_close_to_the_tutorials_float32(applied, mask, dtype, tolerance):
    theirs, ours = pair(applied, dtype)
    inputs = example(dtype)
    theirs, float_inputs = theirs.float(), [states.detach().float().requires_grad_() for states in inputs]
    close = 4 * torch.finfo(dtype).eps
    assert_close(ours(*inputs, mask).float(), theirs(*float_inputs, mask), atol=close, rtol=close)
    expected = gradients(theirs, float_inputs, mask)
    for name, gradient in gradients(ours, inputs, mask).items():
        if expected[name] is None:
            assert gradient is None
        else:  # ReLUs that switch by rounding cost the tutorial itself as much; a NaN fails
            assert (gradient.float() - expected[name]).norm() <= tolerance * expected[name].norm(), name


def test_the_tutorial_itself_fails_in_float16_under_a_mask():
    theirs, _ = pair(True, torch.float16)
    with pytest.raises(RuntimeError, match="overflow"):
        theirs(*example(torch.float16), MASKS["padding"])


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 1, 512).bool()], ids=["none", "padding"])
def test_no_tensor_of_length_by_length_is_made(mask):
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            for tensor in output if isinstance(output, (tuple, list)) else [output]:
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return output

    attention = SelfAttention(16, 2)
    states = torch.randn(1, 512, 16, requires_grad=True)
    with Largest() as largest:
        attention(states, states, states, mask).sum().backward()
    assert 0 < largest.elements <= states.numel()


def test_shapes_and_heads_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="embed_size=30 is not divisible by heads=4; change one of them"):
        TransformerBlock(30, 4, 0.1, 4)
    with pytest.raises(AssertionError):
        SecondTransformerBlock(30, 4, 0.1, 4)
    attention = SelfAttention(SIZE, HEADS)
    values, keys, query = example()
    with pytest.raises(ValueError, match=r"values \(3, 6, 32\) and keys \(3, 7, 32\) must have one shape"):
        attention(values[:, :6], keys, query, None)
    with pytest.raises(ValueError, match=r"the batch size of query \(2, 5, 32\)"):
        attention(values, keys, query[:2], None)


@pytest.mark.parametrize("cls", [TransformerBlock, SecondTransformerBlock, FirstTransformerBlock])
def test_stack_becomes_a_model(cls):
    blocks = stack(cls)
    model = to_model(blocks, vocab_size=VOCAB)
    assert type(model) is TransformerBlockModel
    assert not model.training
    assert model.config.dropout == 0.1
    assert model.config.position_embedding == "none"
    states = torch.randn(BATCH, SOURCE, SIZE)
    assert_close(
        model(inputs_embeds=states).last_hidden_state, apply(blocks, states, None), atol=2e-6, rtol=0
    )
    padding = MASKS["padding"]
    found = model(inputs_embeds=states, attention_mask=padding[:, 0, 0]).last_hidden_state
    assert_close(found, apply(blocks, states, padding), atol=2e-6, rtol=2e-6)


def test_stack_in_float64_becomes_a_model_in_float64():
    blocks = stack().double()
    states = torch.randn(BATCH, SOURCE, SIZE, dtype=torch.float64)
    found = to_model(blocks, vocab_size=VOCAB)(inputs_embeds=states).last_hidden_state
    assert_close(found, apply(blocks, states, None), atol=1e-14, rtol=0)


def test_stack_of_both_texts_keeps_dtype_mode_and_weights():
    blocks = nn.Sequential(
        SecondTransformerBlock(SIZE, HEADS, 0.2, 3), FirstTransformerBlock(SIZE, HEADS, 0.2, 3)
    )
    blocks.to(torch.bfloat16)
    model = to_model(blocks, vocab_size=VOCAB, initializer_range=0.5)
    assert model.training
    assert model.dtype == torch.bfloat16
    assert model.config.initializer_range == 0.5
    assert torch.equal(model.layers[0].self_attn.q_proj.weight, blocks[0].attention.queries.weight)
    assert torch.equal(
        model.layers[1].self_attn.q_proj.weight, torch.eye(SIZE // HEADS, dtype=torch.bfloat16)
    )
    assert torch.equal(model.layers[1].mlp.down_proj.weight, blocks[1].feed_forward[2].weight)


def test_stack_becomes_a_decoder():
    blocks = stack()
    model = to_model(blocks, vocab_size=VOCAB, architecture="decoder")
    states = torch.randn(BATCH, SOURCE, SIZE)
    causal = torch.ones(1, 1, SOURCE, SOURCE).tril()
    found = model(inputs_embeds=states, use_cache=False).last_hidden_state
    assert_close(found, apply(blocks, states, causal), atol=2e-6, rtol=2e-6)


def test_a_query_that_sees_nothing_is_the_one_difference():
    blocks = stack()
    model = to_model(blocks, vocab_size=VOCAB)
    states = torch.randn(BATCH, SOURCE, SIZE)
    mask = MASKS["blind-example"]
    found = model(inputs_embeds=states, attention_mask=mask[:, 0, 0]).last_hidden_state
    expected = apply(blocks, states, mask)
    assert_close(found[[0, 2]], expected[[0, 2]], atol=2e-6, rtol=2e-6)
    assert found.isfinite().all()
    assert not torch.allclose(found[1], expected[1], atol=1e-2)


@pytest.mark.parametrize("has_positions", [True, False])
def test_embeddings_become_tables_of_the_model(has_positions):
    blocks = stack()
    tokens = nn.Embedding(VOCAB, SIZE, padding_idx=3)
    positions = nn.Embedding(SOURCE, SIZE) if has_positions else None
    model = to_model(blocks, tokens, positions, eos_token_id=2)
    config = model.config
    assert (config.vocab_size, config.pad_token_id, config.bos_token_id, config.eos_token_id) == (
        VOCAB,
        3,
        None,
        2,
    )
    input_ids = torch.randint(VOCAB, (BATCH, SOURCE))
    index = torch.arange(SOURCE)
    states = tokens(input_ids) + positions(index) if has_positions else tokens(input_ids)
    assert_close(
        model(input_ids=input_ids).last_hidden_state, apply(blocks, states, None), atol=2e-6, rtol=2e-6
    )
    padding = MASKS["padding"]
    is_real = padding[:, 0, 0] != 0
    found = model(input_ids=input_ids, attention_mask=is_real.long()).last_hidden_state
    expected = apply(blocks, states, padding)
    assert_close(found[is_real], expected[is_real], atol=2e-6, rtol=2e-6)
    left = {"attention_mask": is_real.flip(1).long(), "position_ids": index[None]}
    found = model(input_ids=input_ids, **left).last_hidden_state
    assert_close(found, apply(blocks, states, padding.flip(3)), atol=2e-6, rtol=2e-6)


def test_saved_model_is_loaded_bit_equal_and_takes_a_head(tmp_path):
    model = to_model(stack(), nn.Embedding(VOCAB, SIZE), nn.Embedding(SOURCE, SIZE))
    input_ids = torch.randint(VOCAB, (BATCH, SOURCE))
    model.save_pretrained(tmp_path / "base")
    loaded = AutoModel.from_pretrained(tmp_path / "base")
    assert loaded.config.block_style == "tutorial"
    assert loaded.config.pad_token_id is None
    expected = model(input_ids=input_ids).last_hidden_state
    assert torch.equal(loaded(input_ids=input_ids).last_hidden_state, expected)

    head = AutoModelForMaskedLM.from_pretrained(tmp_path / "base")
    assert type(head) is TransformerBlockForMaskedLM
    logits = head(input_ids=input_ids).logits
    assert_close(logits, expected @ model.embed_tokens.weight.T, atol=2e-5, rtol=0)
    head.save_pretrained(tmp_path / "head")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "head")
    assert torch.equal(again(input_ids=input_ids).logits, logits)


def test_model_becomes_tutorial_blocks_again():
    theirs = stack()
    theirs[0].norm1.eps = theirs[1].norm1.eps = theirs[2].norm1.eps = 1e-3
    theirs[0].norm2.eps = theirs[1].norm2.eps = theirs[2].norm2.eps = 1e-3
    model = to_model(theirs, vocab_size=VOCAB)
    head = TransformerBlockForMaskedLM(model.config).eval()
    head.model.load_state_dict(model.state_dict())
    blocks = from_model(head)
    assert len(blocks) == 3
    states = torch.randn(BATCH, SOURCE, SIZE)
    for block, source in zip(blocks, theirs, strict=True):
        assert_close(block.state_dict(), source.state_dict(), atol=0, rtol=0)
        assert (block.training, block.dropout.p) == (False, 0.1)
        source.load_state_dict(block.state_dict(), strict=True)
    assert_close(apply(blocks, states, None), apply(theirs, states, None), atol=2e-6, rtol=2e-6)
    assert_close(
        apply(from_model(model.double()), states.double(), None),
        model(inputs_embeds=states.double()).last_hidden_state,
        atol=1e-14,
        rtol=0,
    )


def without_dropout():
    block = SecondTransformerBlock(SIZE, HEADS, 0.1, 2)
    del block.dropout
    return block


@pytest.mark.parametrize(
    ("blocks", "config", "message"),
    [
        ([], {}, "there are no blocks to convert; give at least one"),
        (
            [nn.Linear(2, 2)],
            {},
            r"block 0 \(Linear\) is not the tutorial's: it has no attention.queries, attention.keys",
        ),
        (["block"], {}, r"block 0 \(str\) is not the tutorial's: it has no attention.queries"),
        ([without_dropout()], {}, "it has no dropout$"),
        (
            [*stack(depth=1), *stack(depth=1, size=64)],
            {},
            "must be alike: block 1 has {'hidden_size': 64, .* 32,",
        ),
        ([*stack(depth=2), *stack(depth=1, heads=8)], {}, "block 2 has .*'num_attention_heads': 8,"),
        ([*stack(depth=1), *stack(depth=1, dropout=0.5)], {}, "block 1 has .*'dropout': 0.5"),
        (
            stack(GeluBlock),
            {},
            r"block 0 \(GeluBlock\) has the tutorial's parts, but computes something else",
        ),
        (stack(), {"vocab_size": None}, "give embed_tokens, the token table, or vocab_size"),
        (stack(), {"embed_tokens": nn.Embedding(9, 16)}, "embed_tokens is 16 wide, but the blocks are 32"),
        (
            stack(),
            {"embed_positions": nn.Embedding(9, 8)},
            "embed_positions is 8 wide, but the blocks are 32",
        ),
        (stack(), {"hidden_act": "gelu"}, "has hidden_act='relu', not 'gelu'"),
        (stack(), {"block_style": "pre_norm"}, "has block_style='tutorial', not 'pre_norm'"),
        (
            stack(),
            {"architecture": "encoder-decoder", "decoder_start_token_id": 0},
            "has is_encoder_decoder=False, not True",
        ),
    ],
)
def test_what_cannot_become_a_model_is_refused(blocks, config, message):
    config = {"vocab_size": VOCAB, **config}
    if config["vocab_size"] is None or "embed_tokens" in config:
        del config["vocab_size"]
    with pytest.raises(ValueError, match=message):
        to_model(blocks, **config)


def test_fields_that_the_blocks_decide_cannot_be_given():
    with pytest.raises(TypeError, match="multiple values for keyword argument 'hidden_size'"):
        to_model(stack(), vocab_size=VOCAB, hidden_size=64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_style": "post_norm"}, "has block_style='tutorial', not 'post_norm'"),
        ({"gated_mlp": True}, "has gated_mlp=False, not True"),
        ({"norm_type": "rms_norm"}, "has norm_type='layer_norm', not 'rms_norm'"),
        ({"position_embedding": "rotary"}, "has rope_parameters=None"),
        ({"architecture": "encoder-decoder"}, "has is_encoder_decoder=False, not True"),
    ],
)
def test_other_models_do_not_become_tutorial_blocks(fields, message):
    config = TransformerBlockConfig.tutorial(
        **{"vocab_size": VOCAB, "hidden_size": SIZE, "num_hidden_layers": 1, **fields}
    )
    with pytest.raises(ValueError, match=message):
        from_model(TransformerBlockModel(config))
