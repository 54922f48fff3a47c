"""Publishes a model on the Hub: looks, proves, pushes, and proves again what came back."""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from huggingface_hub import HfApi
from torch import Tensor

from .card import find_auto_class
from .card_checks import front_matter
from .folders import human
from .hub import Place, Push, Pushed, adding, making, told, unproven
from .proof import probe, prove
from .staging import Staged, read_config


def list_files(staged: Staged) -> str:
    """Returns what goes to the Hub under which licence, and what stays, line by line."""
    lines = [f"{human(size):>8}  {name}" for name, size in staged.files.items()]
    lines.append(f"{human(sum(staged.files.values())):>8}  in {len(staged.files)} file(s)")
    if staged.left_out:
        lines.append(f"left out: {', '.join(staged.left_out)}")
    card = front_matter((staged.folder / "README.md").read_text(encoding="utf-8"))
    if staged.is_edited:
        how = "goes as it is: delete it to have it written anew"
        name = (Path(staged.inside) / "README.md").as_posix()
        lines.append(f"{name} differs from what the records give and {how}")
    lines.append(f"licence: {card.get('license')} (--license gives another)")
    return "\n".join(lines)


def snippet(repo_id: str, commit: str, auto_class: str, has_tokenizer: bool) -> str:
    """Returns Python that loads a commit, and no later one."""
    where = f'"{repo_id}", revision="{commit}", trust_remote_code=True'
    names = [auto_class, "AutoTokenizer"] if has_tokenizer else [auto_class]
    lines = [
        f"from transformers import {', '.join(names)}",
        "",
        f"model = {auto_class}.from_pretrained({where})",
    ]
    lines += [f"tokenizer = AutoTokenizer.from_pretrained({where})"] if has_tokenizer else []
    return "\n".join(lines)


def look(push: Push, is_there: bool) -> tuple[bool, Pushed | None, bool]:
    """
    Returns whether the branch is there, where the files are already, and whether a tag is to be made.

    Raises:
        ValueError: the push cannot succeed, or the Hub does not answer; nothing was pushed.
    """
    place, staged = push.place, push.staged
    if not is_there:
        if not staged.is_whole:
            raise ValueError(f"{place.repo_id} is not there yet: push the model without --card-only")
        return False, None, bool(place.tag)
    with told(f"cannot read {place.repo_id}", "nothing was pushed: try again"):
        refs = push.api.list_repo_refs(place.repo_id, repo_type=place.repo_type)
        has_branch = place.branch in [ref.name for ref in refs.branches]
        found = push.find() if has_branch else None
        if not staged.is_whole:
            push.check_weights(place.branch if has_branch else "main")  # from which the branch will start
        return has_branch, found, push.check_tag(found)


def prove_folder(
    folder: Path, staged: Staged, is_pushed: bool, say: Callable[[str], None]
) -> dict[str, Tensor]:
    """Returns what the original computes; raises ValueError unless what was staged computes the same."""
    try:
        original = probe(folder, is_stranger=False, has_tokenizer=staged.has_tokenizer)
        if not is_pushed:
            say(prove(original, staged.folder / staged.inside))
    except ValueError as error:
        raise ValueError(f"{folder} is not fit for others, so it was not pushed: {error}") from error
    return original


def send(push: Push, is_there: bool, has_branch: bool) -> Pushed:
    """Makes what is missing of repository and branch, and the commit on it."""
    api, place, repo_id = push.api, push.place, push.repo_id
    with ExitStack() as notes:
        if not is_there:
            with making(f"the repository {repo_id}", repo_id):
                sdk = "gradio" if place.is_space else None
                api.create_repo(
                    repo_id, private=place.private or None, repo_type=place.repo_type, space_sdk=sdk
                )
            notes.enter_context(adding(f"the repository {repo_id} was made for this push"))
        if not has_branch and place.branch != "main":
            with making(f"the branch {place.branch}", repo_id):
                api.create_branch(repo_id, branch=place.branch, exist_ok=True, repo_type=place.repo_type)
            notes.enter_context(adding(f"the branch {place.branch} was made for this push"))
        whole = "the Space" if place.is_space else "the model"
        what = whole if push.staged.is_whole else "the card"
        return push.run(f"Push {what} with hf_transformer_block")


def prove_space(push: Push, pushed: Pushed, original: dict[str, Tensor]) -> str:
    """Loads the model from a Space as it came back from the Hub, and returns how it went."""
    inside = push.staged.inside
    with tempfile.TemporaryDirectory() as folder:
        with told("it cannot be loaded back", "run again, which is safe"):
            push.api.snapshot_download(
                push.repo_id,
                repo_type="space",
                revision=pushed.commit,
                allow_patterns=f"{inside}/*",
                local_dir=folder,
            )
        return f"back from the Hub, the model {prove(original, Path(folder) / inside)}"


def finish(
    push: Push,
    pushed: Pushed,
    makes_tag: bool,
    original: dict[str, Tensor] | None,
    say: Callable[[str], None],
) -> None:
    """Tags the commit, and proves it unless the card alone was pushed."""
    repo_id, tag = push.repo_id, push.place.tag
    if makes_tag:
        with told(f"{pushed.commit} is pushed, but not tagged {tag}", "run again"):
            push.api.create_tag(repo_id, tag=tag, revision=pushed.commit, exist_ok=True)
        say(f"tagged {tag}")
    if original is None:
        return
    try:
        say(
            prove_space(push, pushed, original)
            if push.place.is_space
            else prove(original, repo_id, pushed.commit)
        )
    except ValueError as error:
        raise ValueError(f"{repo_id} has commit {pushed.commit}, but from there {error}") from error


def conclude(push: Push, pushed: Pushed, auto_class: str, say: Callable[[str], None]) -> None:
    """Says where the commit is and how it loads."""
    endpoint, repo_id = push.api.endpoint, push.repo_id
    page = f"{endpoint}/spaces/{repo_id}" if push.place.is_space else f"{endpoint}/{repo_id}"
    say(f"{page}: commit {pushed.commit} on {pushed.revision}")
    if pushed.revision.startswith("refs/pr/"):
        say(f"open for review: {page}/discussions/{pushed.revision.split('/')[-1]}")
    if push.place.is_space:
        return
    say(f"\n{snippet(repo_id, pushed.commit, auto_class, push.staged.has_tokenizer)}")


def publish(folder: Path, staged: Staged, place: Place, is_there: bool, say: Callable[[str], None]) -> Pushed:
    """
    Checks, pushes, and checks what came back.

    Args:
        folder: the original, whose logits are the measure.
        place, is_there: as `check_access` gives them.
        say: is given a line for each step.

    Raises:
        ValueError: in one sentence, which says whether anything was pushed and what to do.
        KeyboardInterrupt: likewise; it has no words if nothing was pushed.
    """
    push, repo_id = Push(HfApi(), staged, place), place.repo_id
    auto_class = find_auto_class(read_config(folder))
    has_branch, found, makes_tag = look(push, is_there)
    original = prove_folder(folder, staged, found is not None, say) if staged.is_whole else None
    pushed = found or send(push, is_there, has_branch)
    try:
        if not pushed.is_new:
            say(f"nothing to do: {pushed.revision} of {repo_id} holds these very files")
        finish(push, pushed, makes_tag, original, say)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(unproven(repo_id, pushed.commit)) from error
    try:
        conclude(push, pushed, auto_class, say)
    except KeyboardInterrupt as error:
        all_done = f"interrupted, but all is done: {repo_id} has commit {pushed.commit}"
        raise KeyboardInterrupt(all_done) from error
    return pushed
