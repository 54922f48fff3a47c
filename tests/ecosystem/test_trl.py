"""Tests that TRL's trainers fine-tune a decoder of ours: SFT with packing, DPO, GRPO and a reward model."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_tokens
from torch import nn
from torch.testing import assert_close
from transformers import AutoTokenizer

from .conftest import MODELS, load_afresh, words
from .strangers import as_stranger, assert_remote, load_remote


trl = pytest.importorskip("trl", reason='runs after pip install "hf_transformer_block[ecosystem]"')
datasets = pytest.importorskip("datasets", reason='runs after pip install "hf_transformer_block[ecosystem]"')

pytestmark = pytest.mark.ecosystem


def options(folder: Path, **kwargs) -> dict:
    """Returns the arguments of three small steps on a CPU in float32."""
    values = {
        **{"max_steps": 3, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4},
        **{"learning_rate": 5e-3, "logging_steps": 1, "save_strategy": "no", "report_to": []},
        **{"use_cpu": True, "bf16": False, "disable_tqdm": True},
    }
    return {"output_dir": str(folder), **values, **kwargs}


def data(folder: Path, rows: list[dict]):
    """Returns rows as a user has them: lines of JSON in a file."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "cache"))


def chat(prompt: str, *answers: str) -> list[list[dict[str, str]]]:
    """Returns a prompt and its answers as messages."""
    return [[{"role": "user", "content": prompt}]] + [
        [{"role": "assistant", "content": answer}] for answer in answers
    ]


def losses_of(trainer) -> list[float]:
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(map(math.isfinite, found)), found
    return found


def load(folder: Path, name: str = "decoder") -> nn.Module:
    """Loads a folder of `MODELS` by the code beside the weights."""
    return load_remote(MODELS[name][3], folder)


def assert_trained_and_saved(trainer, before: Path, name: str, tmp_path: Path) -> None:
    """The weights have moved, and a process that has only the saved folder finds them and their outputs."""
    assert_remote(trainer.model)
    start = load(before, name)
    trained = {key: value.detach() for key, value in trainer.model.named_parameters()}
    moved = [key for key, value in start.named_parameters() if (trained[key] - value).abs().max() > 1e-4]
    assert len(moved) > 0.7 * len(trained), moved
    saved = tmp_path / "saved"
    trainer.save_model(str(saved))
    inputs = {"input_ids": tiny_tokens(2, 6)}
    found = load_afresh(tmp_path, saved, MODELS[name][3], inputs)
    for key, value in found["parameters"].items():
        assert torch.equal(value, trained[key]), key
    with torch.no_grad():
        expected = trainer.model.eval()(**inputs).logits
    assert_close(found["outputs"]["logits"], expected, rtol=0, atol=1e-6)
    assert AutoTokenizer.from_pretrained(saved, trust_remote_code=True).chat_template


@torch.no_grad()
def log_likelihood(model: nn.Module, ids: list[int], first: int) -> tuple[float, int]:
    """Returns the summed log-probability of the tokens of one text from `first` on, and their number."""
    logits = model.eval()(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)
    wanted = torch.tensor(ids[1:])
    scores = logits.gather(1, wanted[:, None])[max(first - 1, 0) :]
    return scores.sum().item(), len(scores)


def mean_loss(model: nn.Module, texts: list[list[int]], firsts: list[int] | None = None) -> float:
    """Returns the mean loss per token of texts which do not see each other."""
    scores = [log_likelihood(model, *text) for text in zip(texts, firsts or [1] * len(texts), strict=True)]
    return -sum(score for score, _ in scores) / sum(count for _, count in scores)


@pytest.mark.parametrize("packing_strategy", ["bfd", None])
def test_sft_has_the_loss_of_the_single_texts(packing_strategy, folder_of, tmp_path):
    """Packed or padded: several texts share a row of the batch, and none sees another."""
    folder, texts = folder_of("decoder"), words(8)
    packing = {"packing": True, "packing_strategy": packing_strategy} if packing_strategy else {}
    # all rows in one batch, so that the first step's loss is that of all texts
    config = trl.SFTConfig(
        **options(tmp_path / "run", per_device_train_batch_size=8), max_length=24, **packing
    )
    rows = data(tmp_path, [{"text": text} for text in texts])
    trainer = trl.SFTTrainer(
        load(folder), config, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(folder)
    )
    assert len(trainer.train_dataset) < 6 if packing else len(trainer.train_dataset) == 8
    trainer.train()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    losses = losses_of(trainer)
    assert losses[0] == pytest.approx(mean_loss(load(folder), ids), abs=1e-4)
    assert losses[2] < losses[0]
    assert_trained_and_saved(trainer, folder, "decoder", tmp_path)


def test_sft_on_chats_learns_the_answers_alone(folder_of, tmp_path):
    folder = folder_of("decoder")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [chat(*pair) for pair in zip(words(4), words(4), strict=True)]
    rows = data(tmp_path, [{"prompt": prompt, "completion": answer} for prompt, answer in chats])
    config = trl.SFTConfig(**options(tmp_path / "run"), model_init_kwargs={"trust_remote_code": True})
    with as_stranger():
        trainer = trl.SFTTrainer(str(folder), config, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    texts, firsts = [], []
    for prompt, answer in chats:
        texts.append(tokenizer.apply_chat_template(prompt + answer, return_dict=True)["input_ids"])
        asked = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
        firsts.append(len(asked["input_ids"]))
    assert losses_of(trainer)[0] == pytest.approx(mean_loss(load(folder), texts, firsts), abs=1e-4)
    assert_trained_and_saved(trainer, folder, "decoder", tmp_path)


def test_dpo_has_the_loss_of_its_paper(folder_of, tmp_path):
    """arXiv 2305.18290: -log sigmoid(beta * difference of the log-ratios to the reference)."""
    folder, beta = folder_of("decoder"), 0.5
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [chat(*triple) for triple in zip(words(4), words(4), words(4), strict=True)]
    rows = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in chats]
    trainer = trl.DPOTrainer(
        load(folder),
        ref_model=load(folder),
        args=trl.DPOConfig(**options(tmp_path / "run"), beta=beta),
        train_dataset=data(tmp_path, rows),
        eval_dataset=data(tmp_path, rows),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = losses_of(trainer)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)  # the policy is the reference
    assert losses[2] < losses[0]
    policy, reference, expected = trainer.model, load(folder), []
    for prompt, *answers in chats:
        first = len(
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        )
        ratios = []
        for answer in answers:
            ids = tokenizer.apply_chat_template(prompt + answer, return_dict=True)["input_ids"]
            ratios.append(log_likelihood(policy, ids, first)[0] - log_likelihood(reference, ids, first)[0])
        expected.append(-F.logsigmoid(torch.tensor(beta * (ratios[0] - ratios[1]))).item())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(expected) / 4, abs=1e-4)
    assert_trained_and_saved(trainer, folder, "decoder", tmp_path)


def test_grpo_rewards_what_the_model_writes(folder_of, tmp_path):
    folder, seen = folder_of("decoder"), []

    def evenness(completions: list[str], **kwargs) -> list[float]:
        """Returns the share of words with an even number."""
        shares = []
        for text in completions:
            found = [word for word in text.split() if word.startswith("w")]
            shares.append(sum(int(word[1:]) % 2 == 0 for word in found) / max(1, len(found)))
        seen.append((completions, shares))
        return shares

    with as_stranger():
        trainer = trl.GRPOTrainer(
            str(folder),
            evenness,
            args=trl.GRPOConfig(
                **options(tmp_path / "run"),
                num_generations=4,
                max_completion_length=8,
                model_init_kwargs={"trust_remote_code": True},
            ),
            train_dataset=data(tmp_path, [{"prompt": text} for text in words(8)]),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        )
    trainer.train()
    assert len(losses_of(trainer)) == 3
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert logged == pytest.approx([sum(shares) / len(shares) for _, shares in seen], abs=1e-5)
    assert len({text for completions, _ in seen for text in completions}) > 6
    assert_trained_and_saved(trainer, folder, "decoder", tmp_path)


def test_a_reward_model_learns_to_prefer(folder_of, tmp_path):
    """The loss is -log sigmoid(reward of the chosen - reward of the rejected)."""
    folder = folder_of("reward")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [chat(*triple) for triple in zip(words(4), words(4), words(4), strict=True)]
    rows = [{"chosen": prompt + good, "rejected": prompt + bad} for prompt, good, bad in chats]
    trainer = trl.RewardTrainer(
        load(folder, "reward"),
        trl.RewardConfig(**options(tmp_path / "run")),
        train_dataset=data(tmp_path, rows),
        eval_dataset=data(tmp_path, rows),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = losses_of(trainer)
    assert losses[2] < losses[0]

    @torch.no_grad()
    def mean_preference(model: nn.Module) -> float:
        total = 0.0
        for row in rows:
            good, bad = (
                model.eval()(
                    torch.tensor([tokenizer.apply_chat_template(row[side], return_dict=True)["input_ids"]])
                ).logits.item()
                for side in ("chosen", "rejected")
            )
            total -= F.logsigmoid(torch.tensor(good - bad)).item() / len(rows)
        return total

    start = load(folder, "reward")
    assert losses[0] == pytest.approx(mean_preference(start), abs=1e-4)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(mean_preference(trainer.model), abs=1e-4)
    assert_trained_and_saved(trainer, folder, "reward", tmp_path)
