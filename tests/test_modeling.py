"""Tests of the mathematics: attention, positions, norms and blocks against float64 and torch's layers."""

import math

import pytest
import torch
from conftest import MODELS, POSITIONS, SHAPES, model_name, tiny_config, tiny_inputs, tiny_tokens
from torch import nn
from torch.testing import assert_close

from hf_transformer_block import TransformerBlockConfig, TransformerBlockForCausalLM, TransformerBlockModel
from hf_transformer_block.modeling_hf_transformer_block import (
    CACHE,
    TransformerBlockRotaryEmbedding,
    sinusoidal_positions,
)


pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")


@torch.no_grad()
def randomise(module: nn.Module) -> None:
    """Fills biases and norms too, which start at 0 and 1 and so would hide mistakes."""
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)


def float64_rotation(heads: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotates features i and i + K/2 of (B, L, H, K), as one complex number, by p * theta^(-2i/K)."""
    half = heads.shape[-1] // 2
    angles = positions.double()[:, :, None, None] * theta ** -(torch.arange(half, dtype=torch.float64) / half)
    rotated = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([rotated.real, rotated.imag], dim=-1)


def float64_attention(attention, config, hidden, source, visible, positions=None) -> torch.Tensor:
    """Computes attention (B, L, D) head by head and row by row; `visible` is (B, L, S)."""

    def heads(projection, states, norm=None):
        states = states.double() @ projection.weight.double().T + (
            0 if projection.bias is None else projection.bias.double()
        )
        states = states.unflatten(-1, (-1, config.head_dim))
        if config.qk_norm and norm is not None:
            scale = (states**2).mean(dim=-1, keepdim=True) + config.norm_eps
            states = states / scale.sqrt() * norm.weight.double()
        if positions is not None and norm is not None:
            states = float64_rotation(states, positions, config.rope_parameters["rope_theta"])
        return states

    query = heads(attention.q_proj, hidden, attention.q_norm)
    key, value = heads(attention.k_proj, source, attention.k_norm), heads(attention.v_proj, source)
    result = torch.zeros_like(query)
    for b, row, head in torch.cartesian_prod(*(torch.arange(size) for size in query.shape[:3])).tolist():
        served = head // (config.num_attention_heads // config.num_key_value_heads)
        seen = visible[b, row]
        if seen.any():
            scores = key[b, seen, served] @ query[b, row, head] / math.sqrt(config.head_dim)
            weights = scores.exp() / scores.exp().sum()
            result[b, row, head] = weights @ value[b, seen, served]
    bias = 0 if attention.o_proj.bias is None else attention.o_proj.bias.double()
    return result.flatten(-2) @ attention.o_proj.weight.double().T + bias


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "head_dim": 6, "attention_bias": False},
        {"qk_norm": True, "norm_type": "rms_norm", "num_key_value_heads": 2},
        {"position_embedding": "rotary", "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"position_embedding": "rotary", "qk_norm": True, "norm_type": "rms_norm", "head_dim": 10},
    ],
    ids=lambda kwargs: "-".join(kwargs) or "plain",
)
def test_attention_is_its_formula(kwargs, implementation):
    config = tiny_config("decoder", attn_implementation=implementation, **kwargs)
    model = TransformerBlockModel(config).eval()
    randomise(model)
    attention = model.layers[0].self_attn
    hidden = torch.randn(2, 7, config.hidden_size)
    visible = torch.rand(2, 7, 7) < 0.6
    visible[0, 3] = False
    rotary, positions = None, None
    if config.position_embedding == "rotary":
        positions = torch.randint(0, 50, (2, 7))
        rotary = model.rotary_emb(hidden, positions)
    output, _ = attention(hidden, attention_mask=visible[:, None], position_embeddings=rotary)
    expected = float64_attention(attention, config, hidden, hidden, visible, positions)
    assert_close(output.double(), expected, rtol=1e-6, atol=2e-6)


def test_cross_attention_reads_queries_from_the_target_and_keys_and_values_from_the_source():
    config = tiny_config("encoder-decoder", num_key_value_heads=2)
    model = TransformerBlockModel(config).eval()
    randomise(model)
    attention = model.decoder.layers[0].cross_attn
    target, source = torch.randn(2, 3, config.hidden_size), torch.randn(2, 8, config.hidden_size)
    output, _ = attention(target, key_value_states=source)
    expected = float64_attention(attention, config, target, source, torch.ones(2, 3, 8, dtype=torch.bool))
    assert_close(output.double(), expected, rtol=1e-6, atol=2e-6)


def test_tutorial_attention_shares_one_projection_and_divides_by_the_width():
    config = tiny_config("encoder", block_style="tutorial", attention_bias=False)
    attention = TransformerBlockModel(config).layers[0].self_attn
    assert attention.q_proj.weight.shape == (8, 8)
    attention.o_proj.bias.data.normal_()  # the tutorial's only bias
    hidden = torch.randn(1, 5, 32)
    split = hidden.double().view(1, 5, 4, 8)
    query, key, value = (
        split @ p.weight.double().T for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    scores = torch.einsum("blhk,bshk->bhls", query, key) / math.sqrt(32)
    mixed = torch.einsum("bhls,bshk->blhk", scores.softmax(dim=-1), value).flatten(-2)
    expected = mixed @ attention.o_proj.weight.double().T + attention.o_proj.bias.double()
    assert_close(attention(hidden)[0].double(), expected, rtol=0, atol=1e-6)


def test_TU4_the_output_projection_is_applied():
    attention = TransformerBlockModel(tiny_config(attention_bias=False)).layers[0].self_attn
    hidden = torch.randn(1, 5, 32)
    assert attention(hidden)[0].abs().max() > 0
    nn.init.zeros_(attention.o_proj.weight)
    assert attention(hidden)[0].abs().max() == 0


@pytest.mark.parametrize("size", [2, 32, 64])
def test_sinusoidal_positions_are_the_papers(size):
    positions = torch.tensor([[0, 1, 2, 77, 1023]])
    table = sinusoidal_positions(positions, size)
    assert table.shape == (1, 5, size)
    assert table.dtype == torch.float32
    for row, p in enumerate(positions[0].tolist()):
        for i in range(size // 2):
            angle = p / 10000 ** (2 * i / size)
            assert table[0, row, i].item() == pytest.approx(math.sin(angle), abs=1e-4)
            assert table[0, row, size // 2 + i].item() == pytest.approx(math.cos(angle), abs=1e-4)


def test_positions_are_added_to_scaled_embeddings():
    ids = tiny_tokens(2, 5)
    for kind, scale in [("sinusoidal", True), ("learned", False), ("none", True)]:
        config = tiny_config("encoder", position_embedding=kind, scale_embeddings=scale)
        model = TransformerBlockModel(config).eval()
        states = model(ids, output_hidden_states=True).hidden_states[0]
        expected = model.embed_tokens.weight[ids] * (math.sqrt(32) if scale else 1)
        if kind == "sinusoidal":
            expected = expected + sinusoidal_positions(torch.arange(5)[None], 32)
        if kind == "learned":
            expected = expected + model.embed_positions.weight[:5]
        assert_close(states, expected, rtol=0, atol=1e-6)


def test_rotary_angles_are_in_float32_and_only_part_of_a_head_turns():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = TransformerBlockConfig.modern(
        architecture="decoder", hidden_size=64, num_attention_heads=4, rope_parameters=rope
    )
    rotary = TransformerBlockRotaryEmbedding(config)
    positions = torch.tensor([[0, 1, 5, 4000]])
    cos, sin = rotary(torch.zeros(1, dtype=torch.bfloat16), positions)
    assert (cos.dtype, cos.shape) == (torch.bfloat16, (1, 4, 8))
    angles = positions.double()[..., None] * 10000.0 ** -(torch.arange(0, 8, 2).double() / 8)
    assert_close(cos.double(), angles.cos().repeat(1, 1, 2), rtol=0, atol=2**-8)
    assert_close(sin.double(), angles.sin().repeat(1, 1, 2), rtol=0, atol=2**-8)
    model = TransformerBlockModel(config).eval()
    ids = tiny_tokens(1, 6)
    assert_close(model(ids)[0], model(ids, position_ids=torch.arange(6)[None] + 9)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm_type", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_computed_in_float32(norm_type, dtype):
    config = tiny_config("encoder", norm_type=norm_type, norm_eps=1e-5)
    norm = TransformerBlockModel(config).to(dtype).layers[0].mlp_norm
    states = (torch.randn(4, 32) * 300 + 20).to(dtype)  # squares overflow float16
    exact = states.double()
    if norm_type == "layer_norm":
        exact = exact - exact.mean(dim=-1, keepdim=True)
    exact = exact / ((exact**2).mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert_close(norm(states).double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("gated", [False, True])
def test_mlp_is_its_formula(activation, gated):
    model = TransformerBlockModel(tiny_config("encoder", gated_mlp=gated, hidden_act=activation)).double()
    randomise(model)
    mlp = model.layers[0].mlp
    states = torch.randn(3, 32, dtype=torch.float64)

    def linear(layer, inputs):
        return inputs @ layer.weight.T + layer.bias

    act = {
        "relu": lambda x: x.clamp(min=0),
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "silu": lambda x: x / (1 + torch.exp(-x)),
    }[activation]
    up = linear(mlp.up_proj, states)
    inner = act(linear(mlp.gate_proj, states)) * up if gated else act(up)
    assert_close(mlp(states), linear(mlp.down_proj, inner), rtol=0, atol=1e-12)


def copy_attention(theirs: nn.MultiheadAttention, ours: nn.Module) -> None:
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    theirs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
    theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
    theirs.out_proj.load_state_dict(ours.o_proj.state_dict())


@torch.no_grad()
def torch_layer(block: nn.Module, config: TransformerBlockConfig, activation: str) -> nn.Module:
    """Returns torch's layer with a block's weights, in float64."""
    kind = nn.TransformerDecoderLayer if block.has_cross_attention else nn.TransformerEncoderLayer
    layer = kind(
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
        dropout=0.0,
        activation=activation,
        layer_norm_eps=config.norm_eps,
        batch_first=True,
        norm_first=config.block_style == "pre_norm",
        dtype=torch.float64,
    )
    copy_attention(layer.self_attn, block.self_attn)
    norms = [block.self_attn_norm, block.mlp_norm]
    if block.has_cross_attention:
        copy_attention(layer.multihead_attn, block.cross_attn)
        norms.insert(1, block.cross_attn_norm)
    for index, norm in enumerate(norms, start=1):
        getattr(layer, f"norm{index}").load_state_dict(norm.state_dict())
    layer.linear1.load_state_dict(block.mlp.up_proj.state_dict())
    layer.linear2.load_state_dict(block.mlp.down_proj.state_dict())
    return layer.train()  # no dropout, and no fused inference path


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("style", ["post_norm", "pre_norm"])
def test_stacks_are_torchs_layers(style, activation):
    config = tiny_config(
        "encoder-decoder",
        block_style=style,
        hidden_act=activation,
        position_embedding="none",
        scale_embeddings=False,
        num_decoder_layers=3,
    )
    model = TransformerBlockModel(config).double().eval()
    randomise(model)
    source, target = tiny_tokens(2, 8), tiny_tokens(2, 5)
    mask = torch.tensor([[1] * 8, [1] * 6 + [0] * 2])
    encoded = model.encoder.embed_tokens(source)
    for block in model.encoder.layers:
        encoded = torch_layer(block, config, activation)(encoded, src_key_padding_mask=mask == 0)
    encoded = model.encoder.norm(encoded)
    decoded = model.decoder.embed_tokens(target)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for block in model.decoder.layers:
        layer = torch_layer(block, config, activation)
        decoded = layer(decoded, encoded, tgt_mask=causal, memory_key_padding_mask=mask == 0)
    outputs = model(source, attention_mask=mask, decoder_input_ids=target)
    real = mask.bool()
    assert_close(outputs.encoder_last_hidden_state[real], encoded[real], rtol=0, atol=1e-10)
    assert_close(outputs.last_hidden_state, model.decoder.norm(decoded), rtol=0, atol=1e-10)
    assert isinstance(model.decoder.norm, nn.LayerNorm if style == "pre_norm" else nn.Identity)


def test_tutorial_blocks_follow_their_equation():
    model = TransformerBlockModel(tiny_config("encoder", block_style="tutorial")).double().eval()
    randomise(model)
    block, states = model.layers[0], torch.randn(2, 5, 32, dtype=torch.float64)
    inner = block.self_attn_norm(block.self_attn(states)[0] + states)
    assert_close(block(states), block.mlp_norm(block.mlp(inner) + inner), rtol=0, atol=1e-12)


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_decoder_sees_the_past_only_and_an_encoder_everything(positions):
    for shape in SHAPES:
        config = tiny_config(shape, position_embedding=positions)
        model = TransformerBlockModel(config).eval()
        inputs = tiny_inputs(config, batch=1, length=8)
        target = "decoder_input_ids" if config.is_encoder_decoder else "input_ids"
        changed = {**inputs, target: inputs[target].clone()}
        changed[target][:, 3] = (changed[target][:, 3] + 1) % 58 + 3
        moved = (model(**inputs)[0] - model(**changed)[0]).abs().amax(dim=-1)[0]
        assert moved[3] > 1e-2
        assert moved[4:].max() > 1e-3
        assert (moved[:3] == 0).all() if shape != "encoder" else (moved[:3] > 0).all()


def test_each_key_and_value_head_serves_its_own_group_of_queries():
    config = tiny_config("decoder", num_key_value_heads=2, attention_bias=False)
    attention = TransformerBlockModel(config).layers[0].self_attn
    assert attention.k_proj.weight.shape == (16, 32)
    attention.o_proj.weight.data.copy_(torch.eye(32))
    hidden = torch.randn(1, 4, 32)
    before = attention(hidden)[0]
    attention.v_proj.weight.data[8:] = 0
    after = attention(hidden)[0]
    assert_close(after[..., :16], before[..., :16], rtol=0, atol=0)
    assert after[..., 16:].abs().max() == 0


@pytest.mark.parametrize(("model_class", "shape"), MODELS, ids=model_name)
def test_inputs_embeds_hidden_states_and_tuples(model_class, shape):
    config = tiny_config(shape, block_style="pre_norm", num_decoder_layers=3 if shape == SHAPES[2] else None)
    model = model_class(config).eval()
    inputs = tiny_inputs(config)
    outputs = model(**inputs, output_hidden_states=True)
    embeds = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
    if config.is_encoder_decoder:
        embeds["decoder_inputs_embeds"] = model.base_model.decoder.embed_tokens(inputs["decoder_input_ids"])
        assert len(outputs.encoder_hidden_states) == 3
        assert_close(outputs.encoder_hidden_states[-1], outputs.encoder_last_hidden_state, rtol=0, atol=0)
        states, count = outputs.decoder_hidden_states, 4
    else:
        states, count = outputs.hidden_states, 3
    assert len(states) == count
    last = model.base_model(**inputs).last_hidden_state
    assert_close(states[-1], last, rtol=0, atol=0)
    names = ("start_logits", "last_hidden_state", "logits")
    name = next(name for name in names if name in outputs)
    assert_close(model(**embeds)[name], outputs[name], rtol=0, atol=0)
    in_tuple = model(**inputs, return_dict=False)
    assert isinstance(in_tuple, tuple)
    assert_close(in_tuple[0], outputs[name], rtol=0, atol=0)


def test_encoder_outputs_stand_in_for_the_source():
    model = TransformerBlockModel(tiny_config("encoder-decoder")).eval()
    inputs = tiny_inputs(model.config)
    whole = model(**inputs)
    encoded = model.encoder(inputs["input_ids"])
    target = inputs["decoder_input_ids"]
    for given in (encoded, (encoded.last_hidden_state,), [encoded.last_hidden_state]):
        again = model(encoder_outputs=given, decoder_input_ids=target)
        assert_close(again.last_hidden_state, whole.last_hidden_state, rtol=0, atol=0)


@pytest.mark.parametrize("use_cache", [True, False])
def test_packed_sequences_with_restarting_positions_do_not_see_each_other(use_cache):
    model = TransformerBlockForCausalLM(tiny_config("decoder", position_embedding="rotary")).eval()
    first, second = tiny_tokens(1, 4), tiny_tokens(1, 6)
    positions = torch.cat([torch.arange(4), torch.arange(6)])[None]
    packed = model(torch.cat([first, second], dim=1), position_ids=positions, use_cache=use_cache).logits
    alone = torch.cat([model(first).logits, model(second).logits], dim=1)
    assert_close(packed, alone, rtol=0, atol=1e-5)


def test_only_decoders_return_a_cache_and_only_if_asked():
    for shape in SHAPES:
        model = TransformerBlockModel(tiny_config(shape)).eval()
        inputs = tiny_inputs(model.config)
        assert (model(**inputs).get(CACHE) is not None) == (shape != "encoder")
        assert model(**inputs, use_cache=False).get(CACHE) is None


def test_a_reference_of_one_layer_by_hand():
    """softmax over two tokens, width 2, one head, identity projections: computed on paper."""
    config = tiny_config(
        "encoder", hidden_size=2, num_attention_heads=1, position_embedding="none", attention_bias=False
    )
    attention = TransformerBlockModel(config).layers[0].self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        projection.weight.data.copy_(torch.eye(2))
    output, _ = attention(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]))
    near = math.exp(1 / math.sqrt(2)) / (math.exp(1 / math.sqrt(2)) + 1)
    assert_close(output, torch.tensor([[[near, 1 - near], [1 - near, near]]]), rtol=0, atol=1e-7)
