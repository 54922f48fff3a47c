"""A Gradio Space of a saved model: the page, the picture of attention, and the model's files in a folder."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from .card import find_head
from .card_checks import front_matter
from .staging import Staged, copy_file, read_config, staged_model


INSIDE = "model"  # the folder that scripts/demo.py reads where none is given
APP_FILE = "app.py"
SCRIPTS = {APP_FILE: "demo.py", "plot_attention.py": "plot_attention.py"}
REQUIRED = ("gradio", "matplotlib", "torch", "transformers")


def pinned() -> dict[str, str]:
    """Returns the versions that are installed here, with which the page has been seen to work."""
    try:
        return {name: version(name).split("+")[0] for name in REQUIRED}  # a build's "+cpu" is in no registry
    except PackageNotFoundError as error:
        raise ValueError(
            f'{error.name} is missing, whose version a Space pins: pip install "hf_transformer_block[demo]"'
        ) from error


def space_card(title: str, model_card: str, model_id: str | None) -> str:
    """Returns the README.md by which the Hub builds a Space."""
    data: dict[str, Any] = {
        "title": title,
        "sdk": "gradio",
        "sdk_version": pinned()["gradio"],
        "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "app_file": APP_FILE,
    }
    license = front_matter(model_card).get("license")  # a card that was written by hand may have none
    data |= {"license": license} if license else {}
    data |= {"models": [model_id]} if model_id else {}
    text = "A page for the model in the folder `model`, whose `README.md` says what it is."
    return f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}---\n\n# {title}\n\n{text}\n"


def check_page(folder: Path) -> None:
    """Raises ValueError for a model without a page: one that has no head, or no tokenizer."""
    head = find_head(read_config(folder))
    if head in (None, "TransformerBlockModel"):
        raise ValueError(f"{folder} holds {head}, for which there is no page: save a model with a head")
    if not (folder / "tokenizer_config.json").is_file():
        raise ValueError(f"{folder} holds no tokenizer, which a page needs: save it beside the model")


@contextmanager
def staged_space(
    folder: Path, template: Path, license_file: Path, scripts: Path, title: str, **card_options
) -> Iterator[Staged]:
    """
    Yields a clean folder with a Space: `staged_model` in `model/`, and what runs it.

    Args:
        scripts: the folder of demo.py and plot_attention.py.
        title: what stands above the Space.
        card_options: of `published_card`; repo_id is the model's own repository, to which the Space links.

    Raises:
        ValueError: something must not be published, or is missing.
    """
    with (
        staged_model(folder, template, license_file, **card_options) as model,
        tempfile.TemporaryDirectory() as place,
    ):
        check_page(folder)
        target = Path(place)
        (target / INSIDE).mkdir()
        for name in model.files:
            copy_file(model.folder / name, target / INSIDE / name)
        for name, script in SCRIPTS.items():
            shutil.copyfile(scripts / script, target / name)
        requirements = "".join(f"{name}=={number}\n" for name, number in pinned().items())
        (target / "requirements.txt").write_text(requirements, encoding="utf-8")
        model_card = (model.folder / "README.md").read_text(encoding="utf-8")
        card = space_card(title, model_card, card_options.get("repo_id"))
        (target / "README.md").write_text(card, encoding="utf-8")
        files = sorted(file for file in target.rglob("*") if file.is_file())
        sizes = {file.relative_to(target).as_posix(): file.stat().st_size for file in files}
        yield Staged(target, sizes, model.left_out, is_edited=model.is_edited, inside=INSIDE)
