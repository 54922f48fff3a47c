"""
What a stranger does with saved folders: this process has neither the package nor a network, and dirty memory.

`python remote_loader.py JOBS.json RESULTS.pt` runs jobs, {name: [function below, its arguments]}, and saves
what each returns, or the traceback of its error.
"""

import copy
import importlib.util
import io
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import torch
import transformers
from transformers import dynamic_module_utils


PACKAGE = "hf_transformer_block"


def isolate() -> list[str]:
    """Takes package and network away from this process; returns the list that attempts to connect extend."""
    sys.modules[PACKAGE] = None
    assert importlib.util.find_spec(PACKAGE) is None
    attempts = []

    def refuse_network(event, arguments):
        is_local = event == "socket.connect" and arguments[0].family == socket.AF_UNIX
        if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto") and not is_local:
            attempts.append(f"{event} {arguments[1:]}")
            raise OSError(f"no network here: {event} {arguments[1:]}")

    sys.addaudithook(refuse_network)
    return attempts


def remember_imports() -> None:
    """Lets transformers list the imports of equal texts once; parsing each anew takes half of the time."""
    get_imports, known = dynamic_module_utils.get_imports, {}

    def get_known_imports(path):
        text = Path(path).read_bytes()
        if text not in known:
            known[text] = get_imports(path)
        return known[text]

    dynamic_module_utils.get_imports = get_known_imports


def dirty_memory() -> None:
    """Leaves NaN in freed blocks of many sizes, which show in whatever is read before it was written."""
    sizes = (1, 2, 4, 8, 16, 32, 64, 256, 800)
    blocks = [torch.full((size,), torch.nan) for size in sizes for _ in range(40)]
    del blocks


def run(model, inputs: dict[str, list]) -> dict[str, torch.Tensor]:
    """Returns the tensors among the outputs of a model in evaluation mode."""
    inputs = {name: torch.tensor(value) for name, value in inputs.items()}
    with torch.no_grad():
        return {name: value for name, value in model(**inputs).items() if isinstance(value, torch.Tensor)}


def from_pretrained(folder: str, auto: str, **kwargs):
    dirty_memory()
    return getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **kwargs)


def describe(model) -> dict:
    return {
        "class": type(model).__name__,
        "module": type(model).__module__,
        "config": type(model.config).__module__,
        "training": model.training,
        "buffers": dict(model.named_buffers()),
        "parameters": {name: parameter.detach() for name, parameter in model.named_parameters()},
    }


def load(folder: str, autos: list[str], inputs: dict, cwd: str | None = None) -> dict:
    """Loads a folder through its configuration and auto classes."""
    if cwd:
        os.chdir(cwd)
    found = {}
    for auto in autos:
        if auto == "AutoConfig":
            found[auto] = from_pretrained(folder, auto).to_dict()
            continue
        model, report = from_pretrained(folder, auto, output_loading_info=True)
        found[auto] = {**describe(model), **report, "outputs": run(model, inputs)}
    return found


def refuse(folder: str, autos: list[str]) -> dict:
    """Tries to load without trust; returns the messages and the remote modules in memory."""
    messages = {}
    for auto in autos:
        try:
            getattr(transformers, auto).from_pretrained(folder)
        except ValueError as error:
            messages[auto] = str(error)
    modules = [name for name in sys.modules if name.startswith("transformers_modules")]
    return {"messages": messages, "modules": modules}


def generate(folder: str, auto: str, inputs: dict, options: dict) -> torch.Tensor:
    inputs = {name: torch.tensor(value) for name, value in inputs.items()}
    return from_pretrained(folder, auto).generate(**inputs, **options)


def clone(folder: str, auto: str, inputs: dict) -> dict:
    """Returns the outputs of a loaded model and of its copies."""
    model = from_pretrained(folder, auto)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    models = {
        "loaded": model,
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(saved, weights_only=False),
        "from_config": getattr(transformers, auto).from_config(
            pickle.loads(pickle.dumps(model.config)), trust_remote_code=True
        ),
    }
    models["from_config"].load_state_dict(model.state_dict())
    return {name: run(each.eval(), inputs) for name, each in models.items()}


def resave(folder: str, auto: str, generations: list[str]) -> list[dict[str, bytes]]:
    """Loads, saves to the next folder and deletes the one before; returns every generation's files."""
    written = []
    for generation in generations:
        from_pretrained(folder, auto).save_pretrained(generation)
        shutil.rmtree(folder)
        folder = generation
        written.append({path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())})
    return written


def translate(folder: str, texts: list[str], options: dict, resaved: str) -> dict:
    """Returns a pipeline's translations, and those of a pipeline from the folder to which it saves itself."""
    found = {}
    for name, source in (("loaded", folder), ("resaved", resaved)):
        pipeline = transformers.pipeline("translation", source, trust_remote_code=True, device="cpu")
        found[name] = pipeline(texts, **options)
        if source == folder:
            pipeline.save_pretrained(resaved)
    unnamed = transformers.pipeline(model=folder, trust_remote_code=True, device="cpu")
    return {**found, "module": type(pipeline).__module__, "unnamed": type(unnamed).__name__}


def tokenize(folder: str, auto: str, text: str) -> dict:
    tokenizer = from_pretrained(folder, "AutoTokenizer")
    encoded = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = from_pretrained(folder, auto)(**encoded).logits
    ids = encoded["input_ids"]
    return {"class": type(tokenizer).__name__, "ids": ids, "text": tokenizer.decode(ids[0]), "logits": logits}


class Sizes(torch.utils.data.Dataset):
    """A data set that carries a configuration into the workers of a DataLoader."""

    def __init__(self, config):
        self.config = config

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return {
            "size": self.config.hidden_size,
            "module": type(self.config).__module__,
            "process": os.getpid(),
        }


def spawn_worker(folder: str) -> dict:
    """Returns what a DataLoader's worker, started afresh, reads from the configuration it was given."""
    data = Sizes(from_pretrained(folder, "AutoConfig"))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="spawn")
    return {"batch": next(iter(loader)), "process": os.getpid()}


def keep_built_in(built_in: str, folder: str, auto: str, inputs: dict) -> list[dict]:
    """Returns a built-in model's description and outputs before and after our folder is loaded."""
    found = []
    for _ in range(2):
        model = getattr(transformers, auto).from_pretrained(built_in)
        found.append({**describe(model), "outputs": run(model, inputs)})
        from_pretrained(folder, auto)
    return found


def main(jobs: str, results: str) -> None:
    attempts = isolate()
    remember_imports()
    found = {}
    for name, (function, arguments) in json.loads(Path(jobs).read_text()).items():
        try:
            found[name] = globals()[function](**arguments)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    state = {"attempts": attempts, "package": sys.modules[PACKAGE], "transformers": transformers.__version__}
    torch.save({"found": found, **state}, results)


def strangers_process(folder: Path, jobs: dict) -> dict:
    """Runs this file in another folder with an empty Hugging Face home; returns what it found and printed."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "jobs.json").write_text(json.dumps(jobs))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    env |= {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums in the same order as here
    warnings = ["-W", "error::DeprecationWarning", "-W", "error::FutureWarning"]
    process = subprocess.run(
        [sys.executable, *warnings, __file__, str(elsewhere / "jobs.json"), str(elsewhere / "results.pt")],
        cwd=elsewhere,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr
    results = torch.load(elsewhere / "results.pt", weights_only=False)
    return {**results, "stderr": process.stderr, "stdout": process.stdout}


if __name__ == "__main__":
    main(*sys.argv[1:])
