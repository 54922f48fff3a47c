"""The Transformer block as a Hugging Face model family: encoder, decoder, encoder-decoder and heads."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .configuration_hf_transformer_block import TransformerBlockConfig
from .modeling_hf_transformer_block import (
    TransformerBlock,
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForMaskedLM,
    TransformerBlockForQuestionAnswering,
    TransformerBlockForSequenceClassification,
    TransformerBlockForTokenClassification,
    TransformerBlockModel,
    TransformerBlockPreTrainedModel,
)


__version__ = "0.1.0"
__all__ = [
    "TransformerBlock",
    "TransformerBlockConfig",
    "TransformerBlockForCausalLM",
    "TransformerBlockForConditionalGeneration",
    "TransformerBlockForMaskedLM",
    "TransformerBlockForQuestionAnswering",
    "TransformerBlockForSequenceClassification",
    "TransformerBlockForTokenClassification",
    "TransformerBlockModel",
    "TransformerBlockPreTrainedModel",
]

AutoConfig.register(TransformerBlockConfig.model_type, TransformerBlockConfig, exist_ok=True)
AutoModel.register(TransformerBlockConfig, TransformerBlockModel, exist_ok=True)
AutoModelForCausalLM.register(TransformerBlockConfig, TransformerBlockForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(TransformerBlockConfig, TransformerBlockForMaskedLM, exist_ok=True)
AutoModelForSeq2SeqLM.register(
    TransformerBlockConfig, TransformerBlockForConditionalGeneration, exist_ok=True
)
AutoModelForSequenceClassification.register(
    TransformerBlockConfig, TransformerBlockForSequenceClassification, exist_ok=True
)
AutoModelForTokenClassification.register(
    TransformerBlockConfig, TransformerBlockForTokenClassification, exist_ok=True
)
AutoModelForQuestionAnswering.register(
    TransformerBlockConfig, TransformerBlockForQuestionAnswering, exist_ok=True
)
# Trainer's own label smoothing shifts the labels of the classes that are named here, and of no other
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TransformerBlockConfig.model_type] = TransformerBlockForCausalLM.__name__
