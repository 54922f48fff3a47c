"""
Times this family and its peers side by side in one process, on random weights and tokens; downloads nothing.

    python scripts/benchmark.py                                    every case
    python scripts/benchmark.py --quick                            fewer rounds, fewer cases: two minutes
    python scripts/benchmark.py train-decoder decode-1             the cases named
    python scripts/benchmark.py --threads 1 --output_file a.json   on one thread, with every figure as json

Our models have the peer's own weights, by the function behind scripts/convert.py, or its shape where there is
no such way. The contestants of a case take turns, so that a machine which is busy is busy for all. A ratio is
a median / the median of our fastest: above 1, ours is faster. Memory, on Linux: "process" is the peak of a
process of its own, above what it held before the model was built; "tensors" is the most that a step's tensors
hold at once, above weights and moments.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import torch
import transformers


try:
    import benchmark_peers as peers
    from benchmark_peers import Run, Shape
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is missing: pip install "hf_transformer_block[bench]"') from error


DECODER = Shape(layers=6, width=256, heads=8, inner=1024, vocabulary=8192, batch=16, length=128)
PAIR = Shape(layers=4, width=128, heads=4, inner=256, vocabulary=9712, batch=64, length=16)
LARGE = Shape(layers=12, width=768, heads=12, inner=3072, vocabulary=50304, batch=16, length=1024)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NEW_TOKENS = 32
QUICK = ("train-decoder", "train-pair", "decode-1", "translate-greedy")
Contestants = dict[str, Callable[[], Run]]


@dataclass(frozen=True)
class Case:
    """
    One thing to do, and functions that build those who do it.

    Contestants whose name begins with "ours" are compared with the others; one that begins with "limit" is no
    model but the least that any model must compute. With `has_memory` the peak of each is measured as well.
    """

    name: str
    about: str
    contestants: Contestants
    has_memory: bool = False


def precisions(name: str, build: Callable[[torch.dtype], Run]) -> Contestants:
    """Returns a contestant in float32 and one in bfloat16."""
    return {f"{name}, {label}": lambda dtype=dtype: build(dtype) for label, dtype in DTYPES.items()}


def trainers(name: str, build: Callable, shape: Shape, device: str, convert: bool = False) -> Contestants:
    """Returns the training steps of a model in both precisions."""

    def step(dtype: torch.dtype) -> Run:
        model = build(shape)
        return peers.train_step(peers.ours(model) if convert else model, shape, device, dtype)

    return precisions(name, step)


def training_cases(device: str) -> list[Case]:
    decoders = {
        **trainers("GPT-2", peers.gpt2, DECODER, device),
        **trainers("Llama", peers.llama, DECODER, device),
        **trainers("x-transformers", peers.XTransformers, DECODER, device),
        **trainers("ours as GPT-2", peers.gpt2, DECODER, device, convert=True),
        **trainers("ours as Llama", peers.llama, DECODER, device, convert=True),
        **precisions("limit: products", lambda dtype: peers.products(DECODER, device, dtype)),
    }
    pairs = {
        **trainers("Marian", peers.marian, PAIR, device),
        **trainers("ours", peers.marian, PAIR, device, convert=True),
        **precisions("limit: products", lambda dtype: peers.products(PAIR, device, dtype, is_pair=True)),
    }
    encoders = {
        **trainers("BERT", peers.bert, DECODER, device),
        **trainers("torch.nn", peers.TorchEncoder, DECODER, device),
        **trainers("ours", peers.our_encoder, DECODER, device),
        **precisions("limit: products", lambda dtype: peers.products(DECODER, device, dtype)),
    }
    large = {
        **trainers("GPT-2", peers.gpt2, LARGE, device),
        **trainers("Llama", peers.llama, LARGE, device),
        **trainers("ours as GPT-2", peers.gpt2, LARGE, device, convert=True),
        **trainers("ours as Llama", peers.llama, LARGE, device, convert=True),
        **precisions("limit: products", lambda dtype: peers.products(LARGE, device, dtype)),
    }
    about = f"compiled training step, decoder of {LARGE}"
    return [Case("train-large", about, large, has_memory=True)] * (device == "cuda") + [
        Case("train-decoder", f"training step, decoder of {DECODER}", decoders, has_memory=True),
        Case("train-pair", f"training step, encoder-decoder of {PAIR}", pairs, has_memory=True),
        Case("train-encoder", f"training step, encoder of {DECODER}", encoders, has_memory=True),
    ]


def growth_cases(device: str) -> list[Case]:
    """How time and memory of a training step grow with length, and with vocabulary."""
    cases = []
    for length in (128, 512, 2048, 8192):
        shape = replace(DECODER, layers=2, batch=1, length=length)
        cases.append(versus_llama(f"length-{length}", shape, device))
    for vocabulary in (8192, 32768, 131072):
        shape = replace(DECODER, layers=2, batch=4, vocabulary=vocabulary)
        cases.append(versus_llama(f"vocabulary-{vocabulary}", shape, device))
    return cases


def versus_llama(name: str, shape: Shape, device: str) -> Case:
    contestants = {
        **trainers("Llama", peers.llama, shape, device),
        **trainers("ours", peers.llama, shape, device, convert=True),
    }
    return Case(name, f"training step, decoder of {shape}", contestants, has_memory=True)


def block_cases(device: str) -> list[Case]:
    shape = replace(DECODER, batch=1, length=2048)
    contestants = {
        "tutorial": lambda: peers.tutorial_block(shape, device),
        "ours": lambda: peers.our_block(shape, device),
    }
    return [Case("block-2048", "forward and backward of the tutorial's block", contestants, has_memory=True)]


def writing(shape: Shape, device: str) -> Contestants:
    """Returns who continues a prompt by `generate`."""

    def write(build: Callable, convert: bool = False) -> Callable[[], Run]:
        return lambda: peers.generate(
            peers.ours(build(shape)) if convert else build(shape), shape, device, NEW_TOKENS
        )

    return {
        "GPT-2": write(peers.gpt2),
        "Llama": write(peers.llama),
        "ours as GPT-2": write(peers.gpt2, convert=True),
        "ours as Llama": write(peers.llama, convert=True),
        "limit: products": lambda: peers.products_of_tokens(shape, device, NEW_TOKENS),
    }


def reading_and_writing_cases(device: str) -> list[Case]:
    prompt = replace(DECODER, batch=1, length=512)
    read = {
        "GPT-2": lambda: peers.prefill(peers.gpt2(prompt), prompt, device),
        "Llama": lambda: peers.prefill(peers.llama(prompt), prompt, device),
        "ours as GPT-2": lambda: peers.prefill(peers.ours(peers.gpt2(prompt)), prompt, device),
        "ours as Llama": lambda: peers.prefill(peers.ours(peers.llama(prompt)), prompt, device),
    }
    cases = [Case("prefill", "reading a prompt of 512 tokens", read)]
    for batch in (1, 16, 64):
        shape = replace(DECODER, batch=batch, length=16)
        about = f"generate: {NEW_TOKENS} tokens behind each of {batch} prompts of 16"
        eager = writing(shape, device)
        peers_alone = {name: build for name, build in eager.items() if not name.startswith("ours")}
        compiled = {
            "ours as Llama, compiled": lambda shape=shape: peers.generate(
                peers.ours(peers.llama(shape)), shape, device, NEW_TOKENS, **peers.compiled()
            )
        }
        cases += [Case(f"decode-{batch}", about, eager)]
        cases += [Case(f"decode-{batch}-compiled", f"{about}, ours compiled", peers_alone | compiled)]
    return cases


def translation_cases(device: str) -> list[Case]:
    cases = []
    for name, beams in (("greedy", 1), ("beam", 5)):
        settings = {"shape": PAIR, "device": device, "new_tokens": 24, "num_beams": beams}
        about = f"64 sentences of 16 tokens, {beams} beam(s), 24 tokens each"
        here = {
            "Marian": lambda settings=settings: peers.generate(peers.marian(PAIR), **settings),
            "ours": lambda settings=settings: peers.generate(peers.ours(peers.marian(PAIR)), **settings),
        }
        exported = {
            "CTranslate2's Marian": lambda settings=settings: peers.translate_by_ctranslate2(
                peers.ctranslate2_of_marian(PAIR), **settings
            ),
            "ours, exported": lambda settings=settings: peers.translate_by_ctranslate2(
                peers.ctranslate2_of_ours(PAIR), **settings
            ),
        }
        cases += [Case(f"translate-{name}", about, here)]
        cases += [Case(f"ctranslate2-{name}", f"{about}, by CTranslate2", exported)]
    return cases


def loading_cases() -> list[Case]:
    contestants = {
        "Llama": lambda: peers.load(peers.llama(DECODER)),
        "ours as Llama": lambda: peers.load(peers.ours(peers.llama(DECODER))),
    }
    imports = {
        "transformers' Llama": lambda: peers.importing("from transformers import LlamaForCausalLM"),
        "ours": lambda: peers.importing("from hf_transformer_block import TransformerBlockForCausalLM"),
    }
    return [
        Case("load", "AutoModelForCausalLM.from_pretrained of a saved folder", contestants),
        Case("import", "a new Python that imports the class", imports),
    ]


def all_cases(device: str) -> dict[str, Case]:
    cases = [
        *training_cases(device),
        *block_cases(device),
        *reading_and_writing_cases(device),
        *translation_cases(device),
        *loading_cases(),
        *growth_cases(device),
    ]
    return {case.name: case for case in cases}


def resident_memory(kind: str) -> float:
    """Returns the memory of this process in MiB: "VmRSS" now, "VmHWM" at its peak."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) / 1024


def peak_of_tensors(run: Run) -> float:
    """Returns by how many MiB tensors on the CPU grow while something runs."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        profile.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_bytes())["traceEvents"]
    changes = sorted(
        (event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]
    )
    totals = [event["args"]["Total Allocated"] for event in changes]
    return (max(totals) - (totals[0] - changes[0]["args"]["Bytes"])) / 2**20


def peak_memory(device: str, case: str, contestant: str) -> dict[str, float]:
    """Returns the peaks of a contestant in MiB: of the process (a GPU: all tensors), of a step's tensors."""
    build = all_cases(device)[case].contestants[contestant]
    before = resident_memory("VmRSS")
    run = build()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: conversions are no part of it
    for _ in range(3):
        run()
    if device == "cuda":
        held, _ = torch.cuda.memory_allocated(), torch.cuda.reset_peak_memory_stats()
        run()
        peak = torch.cuda.max_memory_allocated()
        return {"process_mib": peak / 2**20, "tensors_mib": (peak - held) / 2**20}
    return {"process_mib": resident_memory("VmHWM") - before, "tensors_mib": peak_of_tensors(run)}


def seconds_of(run: Run, device: str) -> float:
    """Returns how long a run takes, to the end of what a GPU has queued."""
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(case: Case, device: str, seconds: float) -> dict[str, dict[str, float]]:
    """Returns median and minimum (seconds) of every contestant; they take turns until the time is up."""
    torch.manual_seed(0)
    runs = {name: build() for name, build in case.contestants.items()}
    for run in runs.values():
        seconds_of(run, device)
    times = {name: [] for name in runs}
    ends = time.perf_counter() + seconds
    while min(map(len, times.values())) < 3 or time.perf_counter() < ends:
        for name, run in runs.items():
            times[name].append(seconds_of(run, device))
    return {
        name: {"median": statistics.median(values), "minimum": min(values), "rounds": len(values)}
        for name, values in times.items()
    }


def add_memory(case: Case, device: str, figures: dict[str, dict[str, float]]) -> None:
    """Measures the peak memory of every contestant, one process after the other."""
    for name in figures:
        if not name.startswith("limit"):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                figures[name] |= process.submit(peak_memory, device, case.name, name).result()


def summarize(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    """Returns the ratios of the fastest peer, and of the limit, to our fastest."""
    kinds = {"ours": {}, "limit": {}, "peer": {}}
    for name, values in figures.items():
        kinds[next((kind for kind in ("ours", "limit") if name.startswith(kind)), "peer")][name] = values
    fastest = {
        kind: min(found, key=lambda name: found[name]["median"]) for kind, found in kinds.items() if found
    }
    ours, peer = figures[fastest["ours"]], figures[fastest["peer"]]
    ratios = {"peer / ours": peer["median"] / ours["median"]}
    if "limit" in fastest:
        ratios["limit / ours"] = figures[fastest["limit"]]["median"] / ours["median"]
    for kind in ("process", "tensors"):
        if f"{kind}_mib" in ours:
            ratios[f"{kind}: memory of ours / of that peer"] = ours[f"{kind}_mib"] / peer[f"{kind}_mib"]
    return ratios


def show(case: Case, figures: dict[str, dict[str, float]], ratios: dict[str, float]) -> None:
    print(f"\n{case.name}: {case.about}")
    ours = min(values["median"] for name, values in figures.items() if name.startswith("ours"))
    print(f"  {'':34}{'median ms':>11}{'minimum':>11}{'/ ours':>9}{'process MiB':>13}{'tensors MiB':>13}")
    for name, values in sorted(figures.items(), key=lambda item: item[1]["median"]):
        peaks = [f"{values[kind]:.0f}" if kind in values else "" for kind in ("process_mib", "tensors_mib")]
        times = f"{values['median'] * 1e3:11.2f}{values['minimum'] * 1e3:11.2f}{values['median'] / ours:9.2f}"
        print(f"  {name:34}{times}{peaks[0]:>13}{peaks[1]:>13}".rstrip())
    print("  " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))


def machine(device: str) -> dict[str, object]:
    """Returns what the figures depend on besides the code."""
    cpus = Path("/proc/cpuinfo")
    models = [
        line.split(":")[1].strip() for line in cpus.read_text().splitlines() if line.startswith("model name")
    ]
    threads = (
        []
        if any(word.startswith("--threads") for word in sys.argv)
        else ["--threads", str(torch.get_num_threads())]
    )
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else (models or [platform.processor()])[0],
        "threads": torch.get_num_threads(),
        "versions": {
            name: version(name) for name in ("torch", "transformers", "x-transformers", "ctranslate2")
        },
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv, *threads]),
    }


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = all_cases(device)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"One of: {', '.join(cases)}.")
    parser.add_argument(
        "--quick", action="store_true", help=f"Only {', '.join(QUICK)}, and few rounds of each."
    )
    parser.add_argument(
        "--threads", type=int, help="Threads of torch. Without: as many as it takes by itself."
    )
    parser.add_argument("--output_file", type=Path, help="File for all figures, as json.")
    arguments = parser.parse_args()
    names = arguments.cases or (QUICK if arguments.quick else list(cases))
    for name in names:
        if name == "train-large" and device == "cpu":
            parser.error("the case 'train-large' needs a GPU, and torch sees none")
        if name not in cases:
            parser.error(f"there is no case {name!r}; known: {', '.join(cases)}")
    if arguments.threads is not None and arguments.threads < 1:
        parser.error(f"--threads {arguments.threads} must be at least 1")
    if arguments.output_file and arguments.output_file.is_dir():
        parser.error(f"--output_file {arguments.output_file} is a folder: name a file in it")
    if arguments.output_file and not arguments.output_file.parent.is_dir():
        parser.error(f"--output_file {arguments.output_file}: there is no folder for it")
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results = {"machine": machine(device), "cases": {}}
    print(json.dumps(results["machine"], indent=2))
    for name in tqdm(names, desc="cases", disable=None):
        figures = measure(cases[name], device, 5.0 if arguments.quick else 30.0)
        if cases[name].has_memory and not arguments.quick and sys.platform == "linux":
            add_memory(cases[name], device, figures)
        ratios = summarize(figures)
        show(cases[name], figures, ratios)
        results["cases"][name] = {"about": cases[name].about, "figures": figures, "ratios": ratios}
        if arguments.output_file:
            arguments.output_file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
