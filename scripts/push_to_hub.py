"""
Pushes a trained model to the Hub in one commit, and proves that anyone can load it.

    python scripts/push_to_hub.py runs/en-de my-name/en-de --dry-run     what would go there, without network
    python scripts/push_to_hub.py runs/en-de my-name/en-de --private
    python scripts/push_to_hub.py runs/en-de my-name/en-de --language en de --license cc-by-4.0 --tag v1
    python scripts/push_to_hub.py runs/en-de my-name/en-de --card-only   a new card for what is there
    python scripts/push_to_hub.py runs/en-de someone/en-de --create-pr   offers it to a repository of others
    python scripts/push_to_hub.py runs/en-de --space my-name/en-de-demo  a page that runs it, as a Space

Only the files of a model go along: weights, code, tokenizer, card, curve and scores. `hf auth login`, or the
variable HF_TOKEN, holds the token. Whatever fails, running it again is safe.
"""

import argparse
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path


try:
    from huggingface_hub import HfApi

    from hf_transformer_block import hub, records
    from hf_transformer_block.publishing import list_files, publish
    from hf_transformer_block.spaces import staged_space
    from hf_transformer_block.staging import Staged, staged_model
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is missing: pip install "hf_transformer_block[train]"') from error


ROOT = Path(__file__).parents[1]
CARD, LICENSE = ROOT / "model_card.md", ROOT / "LICENSE"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="What train.py or save_pretrained left.")
    parser.add_argument("repo_id", nargs="?", help="user/name or organization/name; a bare name is yours.")
    parser.add_argument(
        "--space",
        metavar="NAME",
        help="Push a Space with scripts/demo.py and the model to user/NAME; repo_id, if given, is the model "
        "on the Hub that it links to.",
    )
    parser.add_argument("--private", action="store_true", help="Create it private.")
    parser.add_argument("--branch", default="main", help="Branch; created from main if missing.")
    parser.add_argument("--create-pr", action="store_true", help="Open a pull request instead of a commit.")
    parser.add_argument("--tag", help="Tag the commit, as in v1; the card loads by it.")
    parser.add_argument(
        "--license",
        help="Id of the Hub's list. Without: apache-2.0 for weights trained from random ones, else unknown.",
    )
    parser.add_argument("--language", nargs="+", help="ISO 639 codes, as in en de.")
    parser.add_argument("--datasets", nargs="+", help="Ids on the Hub that it was trained on.")
    parser.add_argument("--card-only", action="store_true", help="Push README.md, and no other file.")
    parser.add_argument("--dry-run", action="store_true", help="Print files and cards; touch no network.")
    arguments = parser.parse_args()
    if not (arguments.repo_id or arguments.space):
        parser.error("give the repository, as in my-name/en-de, or --space my-name/en-de-demo")
    if arguments.space and (arguments.card_only or arguments.tag or arguments.branch != "main"):
        parser.error("--space: the Hub runs a whole Space from main; leave --card-only, --tag, --branch out")
    if arguments.tag and arguments.create_pr:
        parser.error("--tag and --create-pr: a pull request is tagged when it is merged")
    if arguments.branch != "main" and arguments.create_pr:
        parser.error("--branch and --create-pr: a pull request has a branch of its own")
    return arguments


def staged(
    arguments: argparse.Namespace, place: hub.Place, model_id: str | None
) -> AbstractContextManager[Staged]:
    """Returns the context of a clean folder with what goes to a place; a Space links to the model."""
    options = {name: getattr(arguments, name) for name in ("license", "language", "datasets")}
    if place.is_space:
        scripts, title = ROOT / "scripts", place.repo_id.split("/")[-1]
        options |= {"repo_id": model_id}
        return staged_space(arguments.folder, CARD, LICENSE, scripts, title, **options)
    # a pull request is for main, where it will be merged; its own name is not known yet
    branch = None if place.branch == "main" else place.branch
    options |= {"repo_id": place.repo_id, "revision": place.tag or branch, "card_only": arguments.card_only}
    return staged_model(arguments.folder, CARD, LICENSE, **options)


def main() -> None:
    arguments = parse_arguments()
    folder, model_id = arguments.folder, arguments.repo_id if arguments.space else None
    place = hub.Place(
        arguments.space or arguments.repo_id,
        arguments.branch,
        arguments.create_pr,
        arguments.private,
        arguments.tag,
        is_space=bool(arguments.space),
    )
    try:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: give one that train.py or save_pretrained wrote")
        if model_id:
            hub.check_names(hub.Place(model_id))
        if arguments.dry_run:
            hub.check_names(place)
            place = replace(place, repo_id=hub.full_name(place.repo_id, "your-name"))
            model_id = model_id and hub.full_name(model_id, "your-name")
        else:
            place, is_there = hub.check_access(HfApi(), place)
            model_id = model_id and hub.find_model(HfApi(), model_id)
        with records.locked(folder), staged(arguments, place, model_id) as clean:
            print(list_files(clean))
            if arguments.dry_run:
                for name in (name for name in clean.files if Path(name).name == "README.md"):
                    print(f"\n{name}:\n\n{(clean.folder / name).read_text(encoding='utf-8')}")
            else:
                publish(folder, clean, place, is_there, print)
    except (ValueError, OSError) as error:
        raise SystemExit(f"push_to_hub.py: {error}") from error
    except KeyboardInterrupt as error:
        raise SystemExit(
            f"push_to_hub.py: {str(error) or hub.INTERRUPTED}; running it again is safe"
        ) from error


if __name__ == "__main__":
    main()
