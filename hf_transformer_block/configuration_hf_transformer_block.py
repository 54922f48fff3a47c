# Copyright 2026 The hf_transformer_block authors. Licensed under the Apache License, Version 2.0.
"""The configuration of the TransformerBlock family; it travels with every checkpoint."""

import copy
import difflib
import re
from dataclasses import fields

import transformers
from huggingface_hub.dataclasses import strict


OLDEST_TRANSFORMERS = (5, 16, 1)
FORMAT_VERSION = 1
POOLING = {"encoder": ("mean", "cls"), "decoder": ("last",), "encoder-decoder": (None,)}

if tuple(map(int, re.findall(r"\d+", transformers.__version__)[:3])) < OLDEST_TRANSFORMERS:
    raise ImportError(
        f"hf_transformer_block needs transformers >= {'.'.join(map(str, OLDEST_TRANSFORMERS))} but found "
        f"{transformers.__version__}: pip install --upgrade transformers"
    )


def nearest(name: str, known: list[str], cutoff: float = 0.6) -> str:
    """Returns the hint "; did you mean 'x'?" for a misspelt name, or an empty string."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {matches[0]!r}?" if matches else ""


@strict
class TransformerBlockConfig(transformers.PreTrainedConfig):
    """
    Describes an encoder, a decoder or an encoder-decoder made of one Transformer block.

    The default values are the encoder-decoder of "Attention Is All You Need" (arXiv 1706.03762), at a small
    size. The tutorial's words `embed_size`, `heads`, `num_layers` and `forward_expansion` (the MLP's width
    as a multiple of `hidden_size`) are understood as well.

    Args:
        architecture: "encoder", "decoder" or "encoder-decoder".
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks (of the encoder, in an encoder-decoder).
        num_decoder_layers: number of decoder blocks in an encoder-decoder; None: `num_hidden_layers`.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads (arXiv 2305.13245); None: as many as query heads.
        head_dim: width of one head; None: `hidden_size / num_attention_heads`.
        intermediate_size: width inside the MLP; None: `4 * hidden_size`.
        hidden_act: a name in `transformers.activations.ACT2FN`.
        gated_mlp: `down(act(gate(x)) * up(x))` (arXiv 2002.05202) instead of `down(act(up(x)))`.
        norm_type: "layer_norm" or "rms_norm" (arXiv 1910.07467).
        block_style: "post_norm" (the paper), "pre_norm" (arXiv 2002.04745; with a final norm) or "tutorial"
            (projections shared by all heads, scores divided by sqrt(hidden_size), dropout after the norm).
        position_embedding: "sinusoidal", "learned", "rotary" (arXiv 2104.09864) or "none".
        rope_parameters: `rope_theta`, `rope_type` and its scaling, as in transformers; for "rotary" only.
        max_position_embeddings: longest sequence of "sinusoidal" and "learned" positions, in tokens.
        scale_embeddings: multiply token embeddings by sqrt(hidden_size).
        qk_norm: normalise every query and key head (arXiv 2302.05442) with the norm of `norm_type`.
        attention_bias: biases in the attention projections; "tutorial" has one in the output projection only.
        mlp_bias: biases in the MLP.
        lm_head_bias: a bias in the output projection of the language-model heads.
        dropout: on embeddings and on each residual branch, in training.
        attention_dropout: on attention probabilities, in training.
        norm_eps: added to the variance inside a norm.
        initializer_range: standard deviation of initial weights; in "pre_norm" the projections that write to
            the residual stream get it divided by sqrt(2 * number of blocks), as GPT-2 does. In "post_norm"
            and "tutorial" a block's projections are drawn with Xavier's sqrt(2 / (inputs + outputs)), as the
            paper's authors do (Glorot & Bengio 2010), for narrower ones learn far slower there.
        tie_word_embeddings: one table for encoder input, decoder input and output projection.
        use_cache: let decoders return their keys and values.
        pad_token_id, bos_token_id, eos_token_id: ids inside the vocabulary, or None.
        decoder_start_token_id: first decoder input of an encoder-decoder; None: `bos_token_id`.
        classifier_dropout: before the classifier of the classification heads; None: `dropout`.
        classifier_pooling: what sequence classification reads: "mean" or "cls" (first token) of an encoder,
            "last" of a decoder; None: "mean" and "last".
        format_version: version of the checkpoint format; a newer one than this code knows is refused.

    Raises:
        ValueError, or huggingface_hub's StrictDataclassError around it: a field has a value that cannot work;
            the message names it and the remedy.

    Example:
        >>> TransformerBlockConfig.modern(architecture="decoder", hidden_size=64).head_dim
        8
    """

    model_type = "hf_transformer_block"
    keys_to_ignore_at_inference = ["cache", "past_key_values", "encoder_last_hidden_state"]
    attribute_map = {
        "embed_size": "hidden_size",
        "heads": "num_attention_heads",
        "num_layers": "num_hidden_layers",
    }

    architecture: str = "encoder-decoder"
    vocab_size: int = 32000
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_decoder_layers: int | None = None
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "relu"
    gated_mlp: bool = False
    norm_type: str = "layer_norm"
    block_style: str = "post_norm"
    position_embedding: str = "sinusoidal"
    rope_parameters: dict | None = None
    max_position_embeddings: int = 1024
    scale_embeddings: bool = True
    qk_norm: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    lm_head_bias: bool = False
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    norm_eps: float | int = 1e-5
    initializer_range: float | int = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = None
    classifier_dropout: float | int | None = None
    classifier_pooling: str | None = None
    format_version: int = FORMAT_VERSION

    @classmethod
    def vaswani(cls, **kwargs) -> "TransformerBlockConfig":
        """Returns the paper's block, the default: post-norm, LayerNorm, sinusoidal positions, ReLU."""
        return cls(**kwargs)

    @classmethod
    def modern(cls, **kwargs) -> "TransformerBlockConfig":
        """Returns today's block: pre-norm, RMSNorm, rotary positions, gated SiLU, no biases, no dropout."""
        values = {
            "block_style": "pre_norm",
            "norm_type": "rms_norm",
            "position_embedding": "rotary",
            "hidden_act": "silu",
            "gated_mlp": True,
            "scale_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "dropout": 0.0,
        }
        return cls(**{**values, **kwargs})

    @classmethod
    def tutorial(cls, **kwargs) -> "TransformerBlockConfig":
        """Returns an encoder of the tutorial's block, with the positions which the tutorial leaves out."""
        return cls(
            **{"architecture": "encoder", "block_style": "tutorial", "scale_embeddings": False, **kwargs}
        )

    def __post_init__(self, **kwargs):
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        forward_expansion = kwargs.pop("forward_expansion", None)
        self._refuse_misspelt(kwargs)
        self._check_before_deriving()
        if forward_expansion is not None:
            if not isinstance(forward_expansion, int):
                raise ValueError(
                    f"forward_expansion={forward_expansion!r} must be a whole number; give intermediate_size"
                )
            self.intermediate_size = forward_expansion * self.hidden_size
        self._derive()
        if self.rope_parameters and self.position_embedding != "rotary":
            raise ValueError(
                f"rope_parameters={self.rope_parameters} needs position_embedding='rotary', not "
                f"{self.position_embedding!r}; set it or leave rope_parameters out"
            )
        loaded_map = kwargs.pop("auto_map", None) or {}
        pipelines = self._custom_pipelines(kwargs.pop("custom_pipelines", None) or {})
        if pipelines:
            kwargs["custom_pipelines"] = pipelines
        super().__post_init__(**kwargs)
        if self.position_embedding != "rotary":
            self.rope_parameters = None  # the base class fills it for every configuration that has the field
        self.auto_map = self._auto_map() | self._users_classes(loaded_map)
        self.base_model_tp_plan = self._tp_plan()
        self.base_model_pp_plan = self._pp_plan()

    def _refuse_misspelt(self, kwargs: dict) -> None:
        """Raises for a key that nearly spells a field; any other one is kept, for tools write their own."""
        derived = {"is_encoder_decoder"}  # nobody gives it, and tools write the similar tie_encoder_decoder
        names = {field.name for field in fields(self)} - derived
        known = [*names, *self.attribute_map, "forward_expansion"]
        for key in kwargs:
            if hasattr(type(self), key) or key.endswith("_token_id"):
                continue
            # 0.82 lets a letter or a plural slip, and no key that transformers or its tools write
            if hint := nearest(key, known, cutoff=0.82):
                raise ValueError(f"{type(self).__name__} has no field {key!r}{hint}")

    def _check_before_deriving(self) -> None:
        """Raises for names and sizes from which other fields are derived."""
        known = {
            "architecture": ["encoder", "decoder", "encoder-decoder"],
            "norm_type": ["layer_norm", "rms_norm"],
            "block_style": ["post_norm", "pre_norm", "tutorial"],
            "position_embedding": ["sinusoidal", "learned", "rotary", "none"],
            "hidden_act": list(transformers.activations.ACT2FN),
        }
        for field, names in known.items():
            if (value := getattr(self, field)) not in names:
                raise ValueError(
                    f"{field}={value!r} is unknown{nearest(value, names)} (known: {', '.join(names)})"
                )
        for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            if (value := getattr(self, field)) < 1:
                raise ValueError(f"{field}={value} must be at least 1")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads="
                f"{self.num_attention_heads}; change one of them or give head_dim"
            )
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"this checkpoint has format_version={self.format_version} but the code knows up to "
                f"{FORMAT_VERSION}: pip install --upgrade hf_transformer_block, or load it with the code "
                f"stored beside the weights"
            )

    def _derive(self) -> None:
        """Fills the fields that were left None."""
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        self.is_encoder_decoder = self.architecture == "encoder-decoder"
        if self.is_encoder_decoder:
            if self.num_decoder_layers is None:
                self.num_decoder_layers = self.num_hidden_layers
            if self.decoder_start_token_id is None:
                self.decoder_start_token_id = self.bos_token_id
        if self.classifier_pooling is None:
            self.classifier_pooling = POOLING[self.architecture][0]

    def _auto_map(self) -> dict[str, str]:
        """Returns the class behind every auto class that fits the architecture, whichever class is saved."""
        heads = {
            "AutoModelForSequenceClassification": "TransformerBlockForSequenceClassification",
            "AutoModelForTokenClassification": "TransformerBlockForTokenClassification",
            "AutoModelForQuestionAnswering": "TransformerBlockForQuestionAnswering",
        }
        models = {
            "encoder": {"AutoModelForMaskedLM": "TransformerBlockForMaskedLM", **heads},
            "decoder": {"AutoModelForCausalLM": "TransformerBlockForCausalLM", **heads},
            "encoder-decoder": {"AutoModelForSeq2SeqLM": "TransformerBlockForConditionalGeneration"},
        }[self.architecture]
        models = {"AutoModel": "TransformerBlockModel", **models}
        configuration = f"{type(self).__module__.split('.')[-1]}.{type(self).__name__}"
        return {
            "AutoConfig": configuration,
            **{auto: f"modeling_hf_transformer_block.{name}" for auto, name in models.items()},
        }

    @staticmethod
    def _users_classes(auto_map: dict) -> dict[str, str]:
        """Returns a loaded map's entries for files of a user's own, but none of another repository ("--")."""
        ours = ("configuration_hf_transformer_block.", "modeling_hf_transformer_block.")
        return {
            auto: name
            for auto, name in auto_map.items()
            if isinstance(name, str) and "--" not in name and not name.startswith(ours)
        }

    def _custom_pipelines(self, loaded: dict) -> dict[str, dict]:
        """Returns a loaded map's classes of a user's own, and an encoder-decoder's behind "translation"."""
        module = "pipeline_hf_transformer_block"
        users = {
            task: entry
            for task, entry in loaded.items()
            if not str(entry.get("impl")).split("--")[-1].startswith(f"{module}.")
        }
        if not self.is_encoder_decoder:
            return users
        impl = f"{module}.TransformerBlockTranslationPipeline"
        return {"translation": {"impl": impl, "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}, **users}

    def _tp_plan(self) -> dict[str, str]:
        """Returns the tensor-parallel plan of one stack; projections shared by all heads stay whole."""
        plan = {"embed_tokens": "embedding_rowwise"}  # a tied table must be split as the output projection is
        plan |= {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
        if self.gated_mlp:
            plan |= {"layers.*.mlp.gate_proj": "colwise"}
        if self.block_style == "tutorial":
            return plan
        for attention in ("self_attn", "cross_attn")[: 1 + self.is_encoder_decoder]:
            plan |= {f"layers.*.{attention}.{name}_proj": "colwise" for name in "qkv"}
            plan |= {f"layers.*.{attention}.o_proj": "rowwise"}
            if self.qk_norm:  # each process sees some of the heads, so it has a part of the norms' gradients
                plan |= {
                    f"layers.*.{attention}.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"
                }
        return plan

    def _pp_plan(self) -> dict[str, tuple[list[str], list[str]]] | None:
        """Returns the pipeline plan of a stack whose blocks read the embeddings as they are, else None."""
        adds_nothing = self.position_embedding in ("rotary", "none") and not self.scale_embeddings
        if self.is_encoder_decoder or not adds_nothing:
            return None
        return {
            "embed_tokens": (["input_ids"], ["inputs_embeds"]),
            "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
            "norm": (["hidden_states"], ["hidden_states"]),
        }

    def get_text_config(self, decoder=None, encoder=None) -> "TransformerBlockConfig":
        """Returns this configuration; for a decoder of another depth than its encoder's, a copy with that."""
        if not decoder or encoder or self.num_decoder_layers in (None, self.num_hidden_layers):
            return self
        config = copy.deepcopy(self)  # the base class would rename decoder_start_token_id
        config.num_hidden_layers = self.num_decoder_layers
        return config

    def validate_sizes(self) -> None:
        """Raises for a size, rate or count that cannot work."""
        for field in ("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings"):
            if (value := getattr(self, field)) < 1:
                raise ValueError(f"{field}={value} must be at least 1")
        for field in ("dropout", "attention_dropout", "classifier_dropout"):
            if (value := getattr(self, field)) is not None and not 0 <= value < 1:
                raise ValueError(f"{field}={value} must be at least 0 and below 1")
        if not self.norm_eps >= 0:
            raise ValueError(f"norm_eps={self.norm_eps} must not be negative")
        if self.num_labels < 1:
            raise ValueError(f"num_labels={self.num_labels} must be at least 1")
        if not self.initializer_range > 0:
            raise ValueError(f"initializer_range={self.initializer_range} must be above 0")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not divisible by num_key_value_heads="
                f"{self.num_key_value_heads}"
            )
        if self.is_encoder_decoder and self.num_decoder_layers < 1:
            raise ValueError(f"num_decoder_layers={self.num_decoder_layers} must be at least 1")
        if not self.is_encoder_decoder and self.num_decoder_layers is not None:
            raise ValueError(
                f"num_decoder_layers={self.num_decoder_layers} needs architecture='encoder-decoder', not "
                f"{self.architecture!r}; num_hidden_layers counts the blocks of one stack"
            )

    def validate_block(self) -> None:
        """Raises for choices that exclude each other."""
        if self.position_embedding == "rotary":
            share = (self.rope_parameters or {}).get("partial_rotary_factor", 1.0)
            if (rotated := int(self.head_dim * share)) % 2 or rotated < 2:
                raise ValueError(
                    f"rotary positions turn features in pairs, but head_dim={self.head_dim} times "
                    f"partial_rotary_factor={share} is {rotated}, which must be even"
                )
        if self.position_embedding == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(f"sinusoidal positions need an even hidden_size, not {self.hidden_size}")
        if self.block_style == "tutorial" and self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"block_style='tutorial' shares each projection among all heads, so num_key_value_heads="
                f"{self.num_key_value_heads} must equal num_attention_heads={self.num_attention_heads}"
            )
        if self.block_style == "tutorial" and self.num_attention_heads * self.head_dim != self.hidden_size:
            raise ValueError(
                f"block_style='tutorial' splits its input into heads, so num_attention_heads="
                f"{self.num_attention_heads} times head_dim={self.head_dim} must be hidden_size="
                f"{self.hidden_size}"
            )
        # the library's caches would obey these keys, and the masks would not
        for field in ("sliding_window", "attention_chunk_size", "layer_types"):
            value = getattr(self, field, None)
            if value is not None and set(value if field == "layer_types" else [value]) != {"full_attention"}:
                raise ValueError(
                    f"{field}={value} is not supported: every layer sees the whole past; leave it out"
                )
        if self.classifier_pooling not in POOLING[self.architecture]:
            raise ValueError(
                f"classifier_pooling={self.classifier_pooling!r} does not fit architecture="
                f"{self.architecture!r} (known: {', '.join(map(str, POOLING[self.architecture]))})"
            )

    def validate_token_ids(self) -> None:
        """Raises for a special token outside the vocabulary, and for a target without a first token."""
        for field in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            value = getattr(self, field)
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is not None and not 0 <= token_id < self.vocab_size:
                    raise ValueError(
                        f"{field}={token_id} is outside the vocabulary (0 to {self.vocab_size - 1}); "
                        f"give an id inside it, or None"
                    )
        if self.is_encoder_decoder and self.decoder_start_token_id is None:
            raise ValueError(
                "an encoder-decoder needs decoder_start_token_id, the first input of its decoder in training "
                "and generation; give it, or bos_token_id"
            )

    def validate_rope(self) -> None:
        """Raises for an unknown kind of rotary scaling; transformers checks the values of the known ones."""
        known = ["default", *transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS]
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type not in known:
            hint = nearest(str(rope_type), known)
            raise ValueError(f"rope_type={rope_type!r} is unknown{hint} (known: {', '.join(known)})")
        for name in ("rope_theta", "factor"):
            if (value := (self.rope_parameters or {}).get(name, 1.0)) is not None and not value > 0:
                raise ValueError(f"{name}={value} in rope_parameters must be above 0")
        super().validate_rope()


TransformerBlockConfig.register_for_auto_class()
