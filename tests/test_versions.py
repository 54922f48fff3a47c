"""
Tests of the range of transformers versions: older ones are refused in one sentence, others pass our tests.

Every version stands in a folder of its own, which comes first on the path. HFTB_OVERLAYS names the place of
these folders; without it pytest's cache keeps them.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_transformer_block import TransformerBlockConfig
from hf_transformer_block.configuration_hf_transformer_block import OLDEST_TRANSFORMERS


TESTS = Path(__file__).parent
FLOOR = ".".join(map(str, OLDEST_TRANSFORMERS))
OLDER = ["4.57.0", "5.0.0rc1", "5.15.0", "5.16.0"]
NEWER = [FLOOR, "5.19.0", "5.99.0", "6.0.0.dev0"]
HUB_1 = ["huggingface_hub<2", "httpx", "httpcore", "certifi"]
HUB_0 = ["huggingface_hub<1", "tokenizers<0.23", "requests", "urllib3", "charset_normalizer", "certifi"]
PACKAGES = {"4.57.3": HUB_0, "5.16.1": HUB_1, "5.19.0": HUB_1}  # what each version needs in other versions
TOPICS = [
    *("configuration", "conformance", "convert", "distributed", "exactness", "generation", "modeling"),
    *("parity", "pipeline", "plans", "remote_code", "survival", "traps", "tutorial"),
]

# argument: {version that transformers pretends to be, or "" for its own: folder}; prints both doors' errors
ENTER = """
import importlib, json, sys
import transformers

def error_of(action, *arguments, **options):
    try:
        action(*arguments, **options)
    except ImportError as error:
        return str(error)

folders, found = json.loads(sys.argv[1]), {}
for version, folder in folders.items():
    transformers.__version__ = version or transformers.__version__
    found[version] = [error_of(transformers.AutoConfig.from_pretrained, folder, trust_remote_code=True)]
for version in folders:
    transformers.__version__ = version or transformers.__version__
    found[version].append(error_of(importlib.import_module, "hf_transformer_block"))
    for name in [name for name in sys.modules if name.split(".")[0] == "hf_transformer_block"]:
        del sys.modules[name]
print(json.dumps({"found": found, "version": transformers.__version__}))
"""
# transformers comes after pytest, whose conftest.py gives it a cache of its own
SESSION = """
import sys, pytest
code = pytest.main()
import transformers
print(transformers.__version__)
sys.exit(code)
"""


def python(code, *arguments, overlay=None, cwd=None, **env):
    """Runs code in a fresh interpreter, with the packages of an overlay first."""
    paths = [*filter(None, [overlay and str(overlay), os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths), **env},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1800,
    )


def errors_at_both_doors(folder, versions, overlay=None):
    """Returns each version's errors, or None, of loading a saved folder and of importing the package."""
    folders = {version: str(folder / (version or "own")) for version in versions}
    for path in folders.values():
        TransformerBlockConfig().save_pretrained(path)
    process = python(ENTER, json.dumps(folders), overlay=overlay, cwd=folder, HF_HOME=str(folder / "home"))
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def assert_refusal(message, version):
    """The message is one sentence with both versions and the remedy."""
    assert message == (
        f"hf_transformer_block needs transformers >= {FLOOR} but found {version}: "
        f"pip install --upgrade transformers"
    )
    assert not re.search(r"[.!?]\s|\n", message)


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    return errors_at_both_doors(tmp_path_factory.mktemp("versions"), OLDER + NEWER)["found"]


@pytest.mark.parametrize("version", OLDER)
def test_older_transformers_are_refused_in_one_sentence(errors, version):
    for message in errors[version]:
        assert_refusal(message, version)


@pytest.mark.parametrize("version", NEWER)
def test_newer_transformers_are_never_refused(errors, version):
    assert errors[version] == [None, None]


def test_the_floor_is_the_one_that_pip_is_told_and_the_oldest_that_is_tested():
    assert f'"transformers>={FLOOR}"' in TESTS.with_name("pyproject.toml").read_text()
    assert FLOOR in PACKAGES


@pytest.fixture
def overlay(request, version):
    """The folder with one version of transformers and what it needs in other versions than ours."""
    # not find_spec("pip"), by which setuptools takes this for pip's process: a later import of it fails then
    if not list(importlib.metadata.distributions(name="pip")):
        pytest.skip("runs in an environment that has pip")
    root = os.environ.get("HFTB_OVERLAYS") or request.config.cache.mkdir("overlays")
    folder = Path(root).absolute() / version
    if not folder.exists():
        partial = folder.with_name(f"{version}.{os.getpid()}")
        quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(partial)]
        packages = [f"transformers=={version}", *PACKAGES[version]]
        pip = subprocess.run(
            [sys.executable, "-m", "pip", "install", *quiet, *packages],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )
        if "from versions: none" in pip.stderr:
            pytest.skip(f"runs on a machine where pip reaches a package index: {pip.stderr.splitlines()[-1]}")
        assert pip.returncode == 0, pip.stderr
        partial.rename(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.16.1", "5.19.0"])
def test_our_tests_pass_with_an_older_transformers_and_nothing_is_deprecated(overlay, version):
    files = {topic: sorted(TESTS.glob(f"test_{topic}*.py")) for topic in TOPICS}
    assert [topic for topic in TOPICS if not files[topic]] == []
    names = [str(path) for topic in TOPICS for path in files[topic]]
    warnings = ["-W", "error::FutureWarning", "-W", "error::DeprecationWarning"]
    options = ["-p", "no:cacheprovider", "-x", "-q", "-n", "2", "--dist", "loadfile"]
    session = python(SESSION, *options, *warnings, *names, overlay=overlay, cwd=TESTS.parent)
    assert session.returncode == 0, session.stdout[-8000:] + session.stderr[-2000:]
    assert session.stdout.splitlines()[-1] == version
    assert int(re.search(r"(\d+) passed", session.stdout)[1]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.57.3"])
def test_a_real_transformers_4_is_refused_in_one_sentence(overlay, version, tmp_path):
    refused = errors_at_both_doors(tmp_path, [""], overlay)
    assert refused["version"] == version
    for message in refused["found"][""]:
        assert_refusal(message, version)
