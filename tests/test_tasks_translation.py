"""Tests of the translation task: pairs from files, what is left out, and what evaluation cuts."""

import pytest
import torch
from accelerate import Accelerator
from conftest import tiny_config


pytest.importorskip("datasets", reason='runs after pip install "hf_transformer_block[train]"')

from hf_transformer_block.loading import Origin, encode, load
from hf_transformer_block.tasks import Evaluator, Split, Translation
from hf_transformer_block.vocabulary import train_tokenizer


def write_pairs(folder, sources: list[str], targets: list[str]) -> Origin:
    for name, lines in (("a.txt", sources), ("b.txt", targets)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return Origin(files=(str(folder / "a.txt"), str(folder / "b.txt")))


def test_pairs_that_teach_nothing_are_counted_or_refused(tmp_path):
    origin = write_pairs(tmp_path, ["one", " ", "three", ""], ["eins", "zwei", "", ""])
    loaded = load(Translation(), origin, "drop")
    assert loaded.rows.to_list() == [{"source": "one", "target": "eins", "row": 0}]
    assert loaded.dropped == {"its source is empty": 2, "its target is empty": 1}
    with pytest.raises(ValueError, match="row 2: its source is empty; mend it, or --bad_rows drop"):
        load(Translation(), origin, "error")


def test_parallel_files_of_unequal_length_are_refused(tmp_path):
    origin = write_pairs(tmp_path, ["one", "two", "three"], ["eins"])
    with pytest.raises(ValueError, match=r"a.txt has 3 lines but .*b.txt has 1: line n of one must be"):
        load(Translation(), origin, "drop")


@pytest.mark.parametrize("files", [("text.txt",), ("a.txt", "b.txt", "c.txt")])
def test_other_files_than_pairs_are_refused(files):
    with pytest.raises(ValueError, match="translation reads one table with two columns"):
        next(Translation().read(files))


def test_nested_columns_are_those_of_translation_data_sets(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"translation": {"en": "one", "de": "eins"}}\n')
    task = Translation(source_column="translation.en", target_column="translation.de")
    rows = load(task, Origin(files=(str(tmp_path / "x.jsonl"),)), "error").rows
    assert rows.to_list() == [{"source": "one", "target": "eins", "row": 0}]
    with pytest.raises(ValueError, match=r"no column 'source' but \['translation'\]: give --source_column"):
        load(Translation(), Origin(files=(str(tmp_path / "x.jsonl"),)), "error")


def test_training_leaves_long_pairs_out_and_evaluation_cuts_and_scores_them(tmp_path):
    task = Translation(max_length=4)
    rows = load(task, write_pairs(tmp_path, ["a b c d e", "a b"], ["a b", "b a"]), "drop").rows
    tokenizer = train_tokenizer(iter(rows["source"]), "word", 30, 4, "encoder-decoder")
    examples, counts = encode(task, rows, tokenizer, True, "drop")
    assert counts == {"it is longer than 4 tokens": 1}
    assert examples["row"] == [1]
    assert examples["length"] == [3]
    with pytest.raises(ValueError, match="it is longer than 4 tokens; mend it"):
        encode(task, rows, tokenizer, True, "error")

    examples, counts = encode(task, rows, tokenizer, False, "drop")
    assert counts == {"cut": 1}
    assert tokenizer.decode(examples[0]["input_ids"]) == "a b c </s>"
    torch.manual_seed(0)
    config = tiny_config("encoder-decoder", vocab_size=len(tokenizer), max_position_embeddings=5)
    model = task.model_class(config)
    model.generation_config.max_new_tokens = 3
    accelerator = Accelerator(cpu=True)
    scores, answers = task.evaluate(
        Evaluator(accelerator, model, tokenizer, 2, num_pairs=1), Split(rows, examples)
    )
    assert len(answers) == 1
    assert scores["targets"] == 6  # a b </s>, b a </s>
    assert {"bleu", "chrf", "exact_match"} <= set(scores)
