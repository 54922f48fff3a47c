"""
Tests of vLLM's Transformers backend, which serves a saved folder by our own code, against our own outputs.

vLLM wants other versions of torch and transformers than the rest, so it stands in an environment of its own:
HFTB_VLLM_PYTHON names its python (docs/vllm.md says how to make one). Nothing of this package is on its path.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import tiny_tokenizer
from safetensors.torch import load_file, save_file
from tiny import assert_varied, build, weaken
from torch.testing import assert_close

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForMaskedLM,
    TransformerBlockForSequenceClassification,
    TransformerBlockModel,
)
from hf_transformer_block.vocabulary import train_tokenizer

from .servers import post, serving


PYTHON = os.environ.get("HFTB_VLLM_PYTHON")
if PYTHON:  # the tests run elsewhere; a link to it knows its environment, what it points to does not
    PYTHON = os.path.abspath(PYTHON)
pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="runs where HFTB_VLLM_PYTHON names vLLM's python: docs/vllm.md"),
]
NEW = 16
PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
# vLLM's kernels take heads of 32, 64, ... features
SIZES = {"head_dim": 32, "hidden_size": 64}
MODELS = {
    "rotary-grouped-qk_norm": ("modern", {}),
    "rotary-tied": ("modern", {"tie_word_embeddings": True, "qk_norm": False}),
    "rotary-partial-linear": (
        "modern",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    ),
    "learned": ("vaswani-learned", {"lm_head_bias": True}),
    "learned-tied": ("modern", {"position_embedding": "learned", "tie_word_embeddings": True}),
    "sinusoidal": ("vaswani", {}),
    "none-one-kv-head": ("vaswani-none", {}),
    "tutorial": ("tutorial", {"hidden_size": 128}),
}

# argument: a file of jobs, {name: {"llm": options of LLM, "prompts": ids, "call": a function below}}
WORKER = """
import json, os, sys
from pathlib import Path
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

def generate(llm, prompts, new):
    options = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
    found = []
    for request in llm.generate(prompts, options, use_tqdm=False):
        output = request.outputs[0]
        logprobs = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs)]
        found.append({"tokens": list(output.token_ids), "logprobs": logprobs})
    return found

def embed(llm, prompts):
    return [request.outputs.embedding for request in llm.embed(prompts, use_tqdm=False)]

def classify(llm, prompts):
    return [request.outputs.probs for request in llm.classify(prompts, use_tqdm=False)]

def main(jobs, results):
    found = {}
    for name, job in json.loads(Path(jobs).read_text()).items():
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        try:
            llm = LLM(**job["llm"])
            found[name] = globals()[job["call"]](llm, prompts, **job["options"])
            del llm
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        cleanup_dist_env_and_memory()
    Path(results).write_text(json.dumps(found))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def strangers_environment(folder: Path, **env: str) -> dict[str, str]:
    """Returns variables for a process of vLLM that knows neither our package nor a network."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    own = {
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the asking process, which starts once
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",  # else log-probabilities wait for a compiler, once in each process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}",
    }
    return {**inherited, **own, **env}


def ask(folder: Path, jobs: dict, **env: str) -> dict:
    """Runs jobs in one process of vLLM; returns what each found, or its error in one line."""
    worker, results = folder / "worker.py", folder / "results.json"
    worker.write_text(WORKER)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with open(folder / "log.txt", "w") as log:
        process = subprocess.run(
            [PYTHON, str(worker), str(folder / "jobs.json"), str(results)],
            cwd=folder,
            env=strangers_environment(folder, **env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=1500,
        )
    assert process.returncode == 0, (folder / "log.txt").read_text()[-8000:]
    return json.loads(results.read_text())


def save(model, folder: Path) -> None:
    """Saves with a tokenizer: vLLM asks for one to embed and to classify, even where it gets ids."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def job(path: Path, prompts: list[list[int]], call: str, options: dict, **llm) -> dict:
    llm = {
        "model": str(path),
        "trust_remote_code": True,
        "model_impl": "transformers",
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": 8,
        **llm,
    }
    return {"llm": llm, "prompts": prompts, "call": call, "options": options}


def decoder(name: str):
    """Returns a model of `MODELS` whose tokens vary."""
    torch.manual_seed(2)  # several others give models that soon repeat one token
    preset, options = MODELS[name]
    values = {"tie_word_embeddings": False, "eos_token_id": None, "initializer_range": 0.4, **SIZES}
    model = build(TransformerBlockForCausalLM, "decoder", preset, **{**values, **options})
    return model if model.config.tie_word_embeddings else weaken(model)


def some_prompts() -> list[list[int]]:
    """Returns ids of prompts of several lengths, one of them a single token; each ends in another token."""
    lengths = (1, 4, 9, 17, 30)
    return [[*torch.randint(3, 61, (length - 1,)).tolist(), 30 + length] for length in lengths]


@torch.no_grad()
def continuations(model, prompts: list[list[int]]) -> list[dict]:
    """Returns what our `generate` writes for each prompt, and each token's log-probability."""
    found = []
    for ids in prompts:
        ids = torch.tensor([ids])
        options = {"max_new_tokens": NEW, "do_sample": False, "output_scores": True}
        written = model.generate(ids, **options, return_dict_in_generate=True)
        tokens = written.sequences[0, ids.shape[1] :]
        logprobs = torch.stack(written.scores)[:, 0].log_softmax(dim=-1)
        logprobs = logprobs.gather(1, tokens[:, None])[:, 0]
        found.append({"tokens": tokens.tolist(), "logprobs": logprobs.tolist()})
    assert_varied(torch.tensor([each["tokens"] for each in found]))
    return found


def assert_same_continuations(found: list[dict] | str, expected: list[dict], name: str) -> None:
    assert not isinstance(found, str), (name, found)
    assert [each["tokens"] for each in found] == [each["tokens"] for each in expected], name
    ours, theirs = (torch.tensor([each["logprobs"] for each in side]) for side in (expected, found))
    assert_close(theirs, ours, rtol=1e-4, atol=1e-4, msg=name)


def test_greedy_tokens_are_ours(tmp_path):
    jobs, expected = {}, {}
    prompts = some_prompts()
    for name in MODELS:
        model = decoder(name)
        save(model, tmp_path / name)
        jobs[name] = job(tmp_path / name, prompts, "generate", {"new": NEW})
        expected[name] = continuations(model, prompts)
    found = ask(tmp_path, jobs)
    for name, each in expected.items():
        assert_same_continuations(found[name], each, name)


def test_two_tensor_parallel_processes_write_the_same(tmp_path):
    jobs, expected = {}, {}
    prompts = some_prompts()
    for name in ("rotary-grouped-qk_norm", "learned-tied"):
        model = decoder(name)
        save(model, tmp_path / name)
        jobs[name] = job(tmp_path / name, prompts, "generate", {"new": NEW}, tensor_parallel_size=2)
        expected[name] = continuations(model, prompts)
    found = ask(tmp_path, jobs)
    for name, each in expected.items():
        assert_same_continuations(found[name], each, name)


POOLED = {
    "MEAN": lambda states: states.mean(dim=0),
    "CLS": lambda states: states[0],
    "LAST": lambda states: states[-1],
}
ENCODERS = {
    "encoder-rotary": (TransformerBlockModel, "encoder", "modern", "MEAN"),
    "encoder-learned": (TransformerBlockModel, "encoder", "vaswani-learned", "CLS"),
    "encoder-masked-lm": (TransformerBlockForMaskedLM, "encoder", "vaswani", "MEAN"),
    "encoder-tutorial": (TransformerBlockModel, "encoder", "tutorial", "MEAN"),
    "decoder": (TransformerBlockModel, "decoder", "modern", "LAST"),
    "decoder-causal-lm": (TransformerBlockForCausalLM, "decoder", "vaswani-learned", "MEAN"),
}


REFUSALS = {
    "encoder-decoder": "Layer 0 dispatches attention from more than one module",
    "encoder": "pooled_data should be a 1-D probability vector",
}


@torch.no_grad()
def hidden_states(model, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [model.base_model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]


def test_embeddings_are_our_hidden_states(tmp_path):
    jobs, expected = {}, {}
    prompts = some_prompts()
    for name, (model_class, shape, preset, pooling) in ENCODERS.items():
        sizes = {**SIZES, "hidden_size": 128 if preset == "tutorial" else 64}
        model = build(model_class, shape, preset, **sizes)
        save(model, tmp_path / name)
        pooler = {"seq_pooling_type": pooling, "use_activation": False}
        options = {"runner": "pooling", "pooler_config": pooler}
        jobs[name] = job(tmp_path / name, prompts, "embed", {}, **options)
        expected[name] = [POOLED[pooling](states) for states in hidden_states(model, prompts)]
    found = ask(tmp_path, jobs)
    for name, states in expected.items():
        assert not isinstance(found[name], str), (name, found[name])
        assert_close(torch.tensor(found[name]), torch.stack(states), rtol=1e-4, atol=1e-4, msg=name)


def test_what_does_not_fit_is_refused(tmp_path):
    pooling = {"runner": "pooling", "pooler_config": {"seq_pooling_type": "MEAN", "use_activation": False}}
    cases = {
        "encoder-decoder": (TransformerBlockForConditionalGeneration, "generate", {"new": 2}, {}),
        "encoder": (TransformerBlockForSequenceClassification, "classify", {}, pooling),
    }
    jobs = {}
    for shape, (model_class, call, options, llm) in cases.items():
        save(build(model_class, shape, "modern", **SIZES, num_labels=3), tmp_path / shape)
        jobs[shape] = job(tmp_path / shape, some_prompts(), call, options, **llm)
    found = ask(tmp_path, jobs)
    for shape, message in REFUSALS.items():
        assert message in found[shape], (shape, found[shape])


def test_the_server_answers_with_our_tokens(tmp_path):
    model, tokenizer = decoder("rotary-grouped-qk_norm"), tiny_tokenizer()
    save(model, tmp_path / "model")
    prompts = some_prompts()[1:]
    expected = continuations(model, prompts)
    texts = tokenizer.batch_decode(prompts)
    assert tokenizer(texts)["input_ids"] == prompts
    request = {
        "model": str(tmp_path / "model"),
        "prompt": texts,
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 0,
        "skip_special_tokens": False,
    }
    # `vllm serve` is the same, but asks for the version of "vllm", and the package for CPUs is "vllm-cpu"
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "model")]
    command += ["--trust-remote-code", "--model-impl", "transformers", "--dtype", "float32"]
    with serving([*command, "--enforce-eager"], tmp_path, strangers_environment(tmp_path), 900) as address:
        choices = json.loads(post(f"{address}/v1/completions", request))["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(prompts)))
    found = [{"tokens": c["token_ids"], "logprobs": c["logprobs"]["token_logprobs"]} for c in choices]
    assert_same_continuations(found, expected, "server")
    written = tokenizer.batch_decode([each["tokens"] for each in expected])
    assert [choice["text"].strip() for choice in choices] == written


@pytest.mark.parametrize("shape", ["encoder", "decoder"])
def test_a_head_renamed_in_a_copy_classifies_as_ours(shape, tmp_path):
    """The documented way: vLLM has a head of its own for whatever pools, and calls its weights "score"."""
    jobs, expected, prompts = {}, {}, some_prompts()
    for preset in ("modern", "vaswani-learned"):
        model = build(TransformerBlockForSequenceClassification, shape, preset, **SIZES, num_labels=3)
        save(model, tmp_path / preset)
        pooling = model.config.classifier_pooling.upper()
        weights = load_file(tmp_path / preset / "model.safetensors")
        weights = {name.replace("classifier.", "score."): value for name, value in weights.items()}
        save_file(weights, tmp_path / preset / "model.safetensors", metadata={"format": "pt"})
        jobs[preset] = job(
            tmp_path / preset,
            prompts,
            "classify",
            {},
            runner="pooling",
            convert="classify",
            hf_overrides={"architectures": ["TransformerBlockForCausalLM"]},
            pooler_config={"seq_pooling_type": pooling, "use_activation": False},
        )
        with torch.no_grad():
            expected[preset] = [model(torch.tensor([ids])).logits[0] for ids in prompts]
    found = ask(tmp_path, jobs)
    for preset, logits in expected.items():
        assert not isinstance(found[preset], str), found[preset]
        assert_close(torch.tensor(found[preset]), torch.stack(logits), rtol=1e-4, atol=1e-4)


def run_block(code: str, folder: Path) -> str:
    """Runs Python of the page from a file, which vLLM's processes import again; returns what it printed."""
    (folder / "block.py").write_text(code)
    command, env = [PYTHON, "block.py"], strangers_environment(folder)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{code}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_the_blocks_of_the_page_do_what_it_says(tmp_path):
    """All but the installation, on small folders of its names."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert [language for language, _ in blocks] == ["bash"] * 3 + ["python"] * 4
    server, request, generates, embeds, renames, classifies = (code for _, code in blocks[1:])
    texts = ["Once upon a time", "It was", "How far is it?"]
    models = {}
    for name, head, shape in (
        ("writer", TransformerBlockForCausalLM, "decoder"),
        ("encoder", TransformerBlockModel, "encoder"),
        ("topics", TransformerBlockForSequenceClassification, "encoder"),
    ):
        tokenizer = train_tokenizer(iter(texts), "char", 60, 64, shape)
        torch.manual_seed(10)  # most others soon repeat one character, or stop
        options = {"vocab_size": len(tokenizer), "num_labels": 3, "initializer_range": 0.4, **SIZES}
        options["tie_word_embeddings"] = False
        models[name] = weaken(build(head, shape, "modern", **options)), tokenizer
        for part in models[name]:
            part.save_pretrained(tmp_path / "runs" / name)
    (tmp_path / "vllm").symlink_to(Path(PYTHON).parents[1])

    model, tokenizer = models["writer"]
    written = []
    for text in texts[:2]:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        found = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
        written.append(tokenizer.decode(found, skip_special_tokens=True))
    assert len(set(written[0])) > 4
    assert run_block(generates, tmp_path).splitlines()[-2:] == written
    command = ["bash", "-c", f'exec {server.strip()} --enforce-eager "$@"', "server"]
    with serving(command, tmp_path, strangers_environment(tmp_path), 900) as address:
        request = request.replace("http://localhost:8000", address)
        answer = subprocess.run(["bash", "-c", request], capture_output=True, text=True, check=True).stdout
    assert json.loads(answer)["choices"][0]["text"] == written[0]

    ids = {name: torch.tensor([tokenizer(texts[2])["input_ids"]]) for name, (_, tokenizer) in models.items()}
    with torch.no_grad():
        mean = models["encoder"][0](ids["encoder"]).last_hidden_state[0].mean(dim=0)
        shares = models["topics"][0](ids["topics"]).logits[0].softmax(dim=-1)
    embedding = json.loads(run_block(embeds, tmp_path).splitlines()[-1])
    assert_close(torch.tensor(embedding), mean, rtol=1e-4, atol=1e-4)
    run_block(renames, tmp_path)
    found = json.loads(run_block(classifies, tmp_path).splitlines()[-1])
    assert_close(torch.tensor(found), shares, rtol=1e-4, atol=1e-4)
