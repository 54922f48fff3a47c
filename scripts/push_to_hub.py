"""
Pushes a trained model to the Hub in one commit, and proves that anyone can load it.

    python scripts/push_to_hub.py runs/en-de my-name/en-de --dry-run     what would go there, without network
    python scripts/push_to_hub.py runs/en-de my-name/en-de --private
    python scripts/push_to_hub.py runs/en-de my-name/en-de --language en de --license cc-by-4.0 --tag v1
    python scripts/push_to_hub.py runs/en-de my-name/en-de --card-only   a new card for what is there
    python scripts/push_to_hub.py runs/en-de someone/en-de --create-pr   offers it to a repository of others

Only the files of a model go along: weights, code, tokenizer, card, curve and scores. `hf auth login`, or the
variable HF_TOKEN, holds the token. Whatever fails, running it again is safe.
"""

import argparse
from dataclasses import replace
from pathlib import Path


try:
    from huggingface_hub import HfApi

    from hf_transformer_block import hub, records
    from hf_transformer_block.publishing import list_files, publish
    from hf_transformer_block.staging import staged_model
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is missing: pip install "hf_transformer_block[train]"') from error


ROOT = Path(__file__).parents[1]
CARD, LICENSE = ROOT / "model_card.md", ROOT / "LICENSE"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="What train.py or save_pretrained left.")
    parser.add_argument("repo_id", help="user/name or organization/name; a bare name is yours.")
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
    parser.add_argument("--dry-run", action="store_true", help="Print files and card; touch no network.")
    arguments = parser.parse_args()
    if arguments.tag and arguments.create_pr:
        parser.error("--tag and --create-pr: a pull request is tagged when it is merged")
    if arguments.branch != "main" and arguments.create_pr:
        parser.error("--branch and --create-pr: a pull request has a branch of its own")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    folder = arguments.folder
    place = hub.Place(
        arguments.repo_id, arguments.branch, arguments.create_pr, arguments.private, arguments.tag
    )
    options = {name: getattr(arguments, name) for name in ("card_only", "license", "language", "datasets")}
    try:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: give one that train.py or save_pretrained wrote")
        if arguments.dry_run:
            hub.check_names(place)
            name = place.repo_id
            place = replace(place, repo_id=name if "/" in name else f"your-name/{name}")
        else:
            place, is_there = hub.check_access(HfApi(), place)
        # a pull request is for main, where it will be merged; its own name is not known yet
        branch = None if place.branch == "main" else place.branch
        options |= {"repo_id": place.repo_id, "revision": place.tag or branch}
        with records.locked(folder), staged_model(folder, CARD, LICENSE, **options) as staged:
            print(list_files(staged))
            if arguments.dry_run:
                print(f"\n{(staged.folder / 'README.md').read_text(encoding='utf-8')}")
            else:
                publish(folder, staged, place, is_there, print)
    except (ValueError, OSError) as error:
        raise SystemExit(f"push_to_hub.py: {error}") from error
    except KeyboardInterrupt as error:
        raise SystemExit(
            f"push_to_hub.py: {str(error) or hub.INTERRUPTED}; running it again is safe"
        ) from error


if __name__ == "__main__":
    main()
