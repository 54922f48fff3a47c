"""Tests of what the model does in a faster way, against the plain way: gradients, products, precisions."""

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config, tiny_inputs, tiny_labels, tiny_tokens
from torch import nn
from torch.testing import assert_close

from hf_transformer_block import TransformerBlockForCausalLM, TransformerBlockForConditionalGeneration
from hf_transformer_block import modeling_hf_transformer_block as modeling


MODERN = {
    "block_style": "pre_norm",
    "norm_type": "rms_norm",
    "gated_mlp": True,
    "position_embedding": "rotary",
}


def test_the_gradient_of_the_norm_is_torchs():
    states = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(modeling.RootMeanSquareNorm.apply, (states, weight, 1e-5))
    assert torch.autograd.gradgradcheck(modeling.RootMeanSquareNorm.apply, (states, weight, 1e-5))
    norm = modeling.TransformerBlockRMSNorm(8, eps=1e-5).double()
    torch.nn.init.normal_(norm.weight)
    ours = torch.autograd.grad(norm(states).sin().sum(), [states, norm.weight])
    theirs = torch.autograd.grad(
        F.rms_norm(states, (8,), norm.weight, 1e-5).sin().sum(), [states, norm.weight]
    )
    assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert norm(states).grad_fn.name() == "RootMeanSquareNormBackward"


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e12])
def test_the_gradient_of_the_norm_at_the_ends_of_float32(scale):
    states = (torch.randn(4, 16) * scale).requires_grad_()
    weight = torch.randn(16, requires_grad=True)
    grad = torch.randn(4, 16)
    ours = torch.autograd.grad(
        modeling.RootMeanSquareNorm.apply(states, weight, 1e-5), [states, weight], grad
    )
    exact = [tensor.detach().double().requires_grad_() for tensor in (states, weight)]
    theirs = torch.autograd.grad(F.rms_norm(exact[0], (16,), exact[1], 1e-5), exact, grad.double())
    assert all(tensor.isfinite().all() for tensor in ours)
    for mine, truth in zip(ours, theirs, strict=True):
        assert_close(mine.double(), truth, rtol=1e-4, atol=float(truth.abs().max()) * 1e-5)


def test_the_norm_takes_gradients_of_single_examples():
    norm = modeling.TransformerBlockRMSNorm(8, eps=1e-5)
    states = torch.randn(5, 8)

    def loss(weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return modeling.RootMeanSquareNorm.apply(state, weight, 1e-5).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(norm.weight, states)
    assert_close(each, torch.stack([torch.func.grad(loss)(norm.weight, state) for state in states]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_the_norm_in_half_precision_is_as_near_as_torchs(dtype):
    norm = modeling.TransformerBlockRMSNorm(256, eps=1e-5).to(dtype)
    states, grad = torch.randn(2, 3, 256) * 30, torch.randn(2, 3, 256)
    half = states.to(dtype).requires_grad_()
    exact = half.detach().double().requires_grad_()
    norm(half).backward(grad.to(dtype))
    F.rms_norm(exact, (256,), norm.weight.detach().double(), 1e-5).backward(grad.to(dtype).double())
    worst = 2 * torch.finfo(dtype).eps * float(exact.grad.abs().max())
    assert_close(half.grad.double(), exact.grad, rtol=0, atol=worst)


def test_the_gradient_of_the_norm_is_in_float32_under_autocast():
    norm = modeling.TransformerBlockRMSNorm(64, eps=1e-5)
    states, grad = torch.randn(5, 64, requires_grad=True), torch.randn(5, 64)
    plain = torch.autograd.grad(norm(states), states, grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(torch.autograd.grad(norm(states), states, grad), plain, rtol=0, atol=0)


def test_layers_are_not_joined_where_some_have_no_bias():
    layers = [nn.Linear(6, 4, bias=bias) for bias in (False, True, True)]
    inputs = torch.randn(2, 6)
    assert_close(modeling.project(inputs, *layers), tuple(layer(inputs) for layer in layers), rtol=0, atol=0)


def test_the_loss_does_not_depend_on_the_default_dtype():
    model = TransformerBlockForCausalLM(tiny_config("decoder")).train()
    ids = tiny_tokens(2, 5)
    loss = model(ids, labels=ids, label_smoothing=0.1).loss
    try:
        torch.set_default_dtype(torch.bfloat16)
        again = model(ids, labels=ids, label_smoothing=0.1).loss
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(again, loss, rtol=1e-2, atol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_layers_that_read_one_input_are_one_product_in_training(bias):
    layers = [nn.Linear(6, size, bias=bias) for size in (6, 2, 4)]
    inputs = torch.randn(2, 3, 6)
    products = []
    linear = F.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", lambda *args: products.append(1) or linear(*args))
        joined = modeling.project(inputs, *layers)
        assert len(products) == 1
        for layer in layers:
            layer.eval()
        apart = modeling.project(inputs, *layers)
        assert len(products) == 4
    assert_close(joined, apart)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    grads = [
        torch.autograd.grad(sum(output.sin().sum() for output in outputs), parameters)
        for outputs in (joined, apart)
    ]
    assert_close(*grads)


def replace_forward(layer: nn.Linear, calls: list) -> None:
    """Does what accelerate's offloading does: the class stays, its forward does not."""
    forward = layer.forward
    layer.forward = lambda *args: calls.append(1) or forward(*args)


@pytest.mark.parametrize(
    "meddle",
    [
        lambda layer, calls: layer.register_forward_hook(lambda *args: calls.append(1)),
        lambda layer, calls: layer.register_forward_pre_hook(lambda *args: calls.append(1)),
        lambda layer, calls: layer.register_full_backward_hook(lambda *args: calls.append(1)),
        lambda layer, calls: layer.register_full_backward_pre_hook(lambda *args: calls.append(1)),
        replace_forward,
    ],
    ids=["hook", "pre-hook", "backward hook", "backward pre-hook", "forward"],
)
@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.up_proj"])
def test_a_layer_that_a_tool_has_changed_is_called(name, meddle):
    model = TransformerBlockForCausalLM(tiny_config("decoder", **MODERN)).train()
    calls, ids = [], tiny_tokens(2, 5)
    meddle(model.model.layers[0].get_submodule(name), calls)
    model(ids, labels=ids).loss.backward()
    assert calls


@pytest.mark.parametrize("is_autocast", [False, True])
def test_attention_trains_in_float32_where_the_cpu_computes_in_bfloat16(is_autocast, monkeypatch):
    seen, attend = [], F.scaled_dot_product_attention

    def watch(query, *args, **kwargs):
        seen.append((query.dtype, torch.is_autocast_enabled("cpu")))
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    model = TransformerBlockForConditionalGeneration(tiny_config("encoder-decoder"))
    model = model if is_autocast else model.bfloat16()
    inputs = tiny_inputs(model.config)
    batch = {**inputs, **tiny_labels(model, inputs)}
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        model.train()(**batch).loss.backward()
    assert seen
    assert set(seen) == {(torch.float32, False)}
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    if not is_autocast:
        seen.clear()
        model.eval()(**batch)
        assert {dtype for dtype, _ in seen} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_is_torchs_without_gradients(dtype):
    norm = modeling.TransformerBlockRMSNorm(256, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    states = torch.randn(3, 7, 256, dtype=dtype) * 5
    with torch.no_grad():
        assert_close(norm(states), F.rms_norm(states, (256,), norm.weight, 1e-5))


@pytest.mark.parametrize("rotated", [8, 6])
def test_the_gradient_of_the_rotation_is_autograds(rotated):
    states = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(2, 5, rotated // 2, dtype=torch.float64).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    fast = modeling.rotate(states, cos, sin)
    plain = modeling.rotate(states, cos.clone().requires_grad_(), sin)  # angles that learn take the plain way
    assert_close(fast, plain, rtol=1e-14, atol=1e-14)
    whole = modeling.turn(states[..., :rotated], cos.unsqueeze(1), sin.unsqueeze(1))
    assert whole.grad_fn.name() == "RotationBackward"
    ours, theirs = (torch.autograd.grad(out.sin().sum(), states)[0] for out in (fast, plain))
    assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    turned = (cos.unsqueeze(1), sin.unsqueeze(1))
    part = states[..., :rotated].detach().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: modeling.Rotation.apply(x, *turned).sin(), part)


def test_angles_that_differ_in_the_halves_are_rotated_by_both():
    states = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, 1, 3, 4, dtype=torch.float64)
    first, second = states.chunk(2, dim=-1)
    expected = states * cos + torch.cat([-second, first], dim=-1) * sin
    assert_close(modeling.rotate(states, cos, sin), expected)
    ours, theirs = (
        torch.autograd.grad(out.sin().sum(), states)[0]
        for out in (modeling.rotate(states, cos, sin), expected)
    )
    assert_close(ours, theirs)


def test_generation_calls_layers_that_are_hooked():
    model = TransformerBlockForCausalLM(tiny_config("decoder", **MODERN)).eval()
    seen = []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *args: seen.append(1))
    model.generate(tiny_tokens(1, 4), max_new_tokens=3, eos_token_id=None)
    assert len(seen) == 3


@pytest.mark.parametrize("vocab_size", [40, 5000])
def test_the_heads_gradient_in_bfloat16_is_as_near_as_torchs(vocab_size):
    hidden, weight = torch.randn(2100, 16), torch.randn(vocab_size, 16) / 4
    labels = torch.randint(vocab_size, (2100,))

    def gradients_of(dtype: torch.dtype, total) -> list[torch.Tensor]:
        inputs = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in (hidden, weight)]
        return [grad.double() for grad in torch.autograd.grad(total(*inputs), inputs)]

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = F.linear(hidden, weight)
        return F.cross_entropy(
            logits if logits.dtype == torch.float64 else logits.float(), labels, reduction="sum"
        )

    exact, theirs = gradients_of(torch.float64, plain), gradients_of(torch.bfloat16, plain)
    ours = gradients_of(
        torch.bfloat16, lambda *inputs: modeling.ChunkedCrossEntropy.apply(*inputs, None, labels, 0.0)
    )
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        assert (mine - truth).norm() < 1.5 * (other - truth).norm()


def test_the_gradient_of_the_gate_is_autograds():
    gate, up = (torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    fast, plain = modeling.SiLUGating.apply(gate, up), F.silu(gate) * up
    assert_close(fast, plain, rtol=0, atol=0)
    ours, theirs = (torch.autograd.grad(out.sin().sum(), [gate, up]) for out in (fast, plain))
    assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradgradcheck(modeling.SiLUGating.apply, (gate, up))


@pytest.mark.parametrize("hidden_act", ["silu", "swish", "gelu_new", "prelu"])
def test_a_gated_network_trains_all_its_weights(hidden_act):
    mlp = modeling.TransformerBlockMLP(
        tiny_config("decoder", **{**MODERN, "hidden_act": hidden_act})
    ).double()
    states = torch.randn(2, 3, mlp.up_proj.in_features, dtype=torch.float64)
    weights = list(mlp.parameters())
    gate, up = mlp.gate_proj(states), mlp.up_proj(states)
    plain = mlp.down_proj(mlp.act_fn(gate) * up)
    ours, theirs = (torch.autograd.grad(out.sin().sum(), weights) for out in (mlp(states), plain))
    assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    is_fast = mlp.let_through(gate, up).grad_fn.name() == "SiLUGatingBackward"
    assert is_fast == (hidden_act in ("silu", "swish"))


def test_an_activation_that_is_hooked_is_called_once():
    mlp = modeling.TransformerBlockMLP(tiny_config("decoder", **MODERN))
    seen = []
    mlp.act_fn.register_forward_hook(lambda *args: seen.append("forward"))
    mlp.act_fn.register_full_backward_hook(lambda *args: seen.append("backward"))
    mlp(torch.randn(2, 3, mlp.up_proj.in_features)).sum().backward()
    assert seen == ["forward", "backward"]


def decoder_and_tokens():
    model = TransformerBlockForCausalLM(tiny_config("decoder", dropout=0.0, **MODERN))
    return model, tiny_tokens(2, 5)


def gradients(model, ids) -> list[torch.Tensor]:
    return torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))


def test_a_step_trains_with_saved_tensors_on_the_cpu():
    model, ids = decoder_and_tokens()
    expected = gradients(model.train(), ids)
    with torch.autograd.graph.save_on_cpu():
        assert_close(gradients(model, ids), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, when first used
@pytest.mark.parametrize("training", [False, True])
def test_forward_mode_gives_the_gradients_of_backward_mode(training):
    model, ids = decoder_and_tokens()
    model.train(training).set_attn_implementation("eager")
    embedded = model.get_input_embeddings()(ids).detach()
    direction = torch.randn_like(embedded)

    def loss(embedded: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=embedded, labels=ids, logits_to_keep=0).loss

    _, forward = torch.func.jvp(loss, (embedded,), (direction,))
    backward = (torch.func.grad(loss)(embedded) * direction).sum()
    assert_close(forward, backward, rtol=1e-4, atol=1e-5)


def test_the_norm_takes_many_weights_at_once():
    norm, states, weights = (
        modeling.TransformerBlockRMSNorm(8, eps=1e-5),
        torch.randn(3, 8),
        torch.randn(4, 8),
    )

    def normed(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (states,))

    expected = torch.stack([normed(weight) for weight in weights])
    assert_close(torch.func.vmap(normed)(weights), expected)
    with torch.no_grad():
        assert_close(torch.func.vmap(normed)(weights), expected)


def test_layers_that_are_none_of_ours_are_not_joined():
    flat = nn.Linear(6, 4)
    flat.weight = nn.Parameter(
        flat.weight.flatten()[:12].detach()
    )  # a shard, as FSDP leaves it outside forward
    offloaded = nn.Linear(6, 4, device="meta")
    for other in (flat, offloaded, nn.Sequential(nn.Linear(6, 4))):
        assert modeling.join((nn.Linear(6, 4), other)) is None
    assert modeling.join((nn.Linear(6, 4), nn.Linear(6, 2)))[0].shape == (6, 6)


class Wrapped(nn.Module):
    """A layer around another one, as tools put it there, without a weight of its own."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * self.base(inputs)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.gate_proj"])
def test_generation_calls_layers_that_are_replaced(name):
    model, ids = decoder_and_tokens()
    block = model.eval().model.layers[0]
    block.set_submodule(name, Wrapped(block.get_submodule(name)))
    settings = {
        "max_new_tokens": 2,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    written = model.generate(ids, **settings)
    with torch.no_grad():
        assert_close(written.logits[0], model(ids, logits_to_keep=1).logits[:, 0], rtol=1e-4, atol=1e-4)


def test_the_block_takes_gradients_of_single_examples():
    config = tiny_config("decoder", dropout=0.0, attn_implementation="eager", **MODERN)
    block = modeling.TransformerBlock(config, 0, is_decoder=True).train()
    weights = dict(block.named_parameters())
    states, angles = (
        torch.randn(3, 4, config.hidden_size),
        torch.randn(1, 4, config.head_dim // 2).repeat(1, 1, 2),
    )
    turned = {"position_embeddings": (angles.cos(), angles.sin())}

    def loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(block, weights, (row.unsqueeze(0),), turned).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, states)
    rows = [torch.autograd.grad(loss(weights, row), weights.values()) for row in states]
    for name, *single in zip(weights, *rows, strict=True):
        assert_close(each[name], torch.stack(single), rtol=1e-4, atol=1e-5)


def test_the_norm_is_the_same_with_and_without_gradients():
    norm, states = modeling.TransformerBlockRMSNorm(64, eps=1e-5).train(), torch.randn(9, 64)
    with torch.no_grad():
        first = norm(states)
    assert norm(states).equal(first)
