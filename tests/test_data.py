"""Tests of the way from files to batches: readers, tokenizers, blocks, the choice of examples, collation."""

import gzip
import json

import pytest
import torch
from datasets import Dataset

from hf_transformer_block.data import (
    SPECIAL_TOKENS,
    TOKENIZERS,
    UpdateSampler,
    collate,
    read_pairs,
    read_texts,
    tokenize_pairs,
    tokenize_stream,
    train_tokenizer,
)


PAIRS = [("a cat", "eine Katze"), ('say "no", twice', "sag „nein“,  zweimal"), ("猫", "chat | кот")]


def write(path, text: str) -> str:
    """Writes a text, gzipped if the name ends so, and returns the path."""
    raw = text.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


def as_pairs(dataset: Dataset) -> list[tuple[str, str]]:
    return list(zip(dataset["source"], dataset["target"], strict=True))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_every_kind_of_file_gives_the_same_pairs(tmp_path, suffix):
    rows = [{"source": source, "target": target} for source, target in PAIRS]
    csv_rows = ["source,target"] + [
        '"' + '","'.join(x.replace('"', '""') for x in pair) + '"' for pair in PAIRS
    ]
    files = {
        "jsonl": "\n".join(map(json.dumps, rows)),
        "csv": "\n".join(csv_rows),
        "tsv": "\n".join(["source\ttarget"] + ["\t".join(pair) for pair in PAIRS]),
    }
    for kind, text in files.items():
        assert as_pairs(read_pairs([write(tmp_path / f"x.{kind}{suffix}", text)])) == PAIRS, kind
    headerless = write(tmp_path / f"plain.tsv{suffix}", "\n".join("\t".join(pair) for pair in PAIRS))
    assert as_pairs(read_pairs([headerless])) == PAIRS
    sides = [write(tmp_path / f"x.{i}{suffix}", "\n".join(p[i] for p in PAIRS) + "\n") for i in (0, 1)]
    assert as_pairs(read_pairs(sides)) == PAIRS


def test_parquet_and_other_column_names(tmp_path):
    file = str(tmp_path / "x.parquet")
    Dataset.from_dict({"en": [p[0] for p in PAIRS], "de": [p[1] for p in PAIRS]}).to_parquet(file)
    assert as_pairs(read_pairs([file], "en", "de")) == PAIRS
    (tmp_path / "x.parquet.gz").write_bytes(gzip.compress((tmp_path / "x.parquet").read_bytes()))
    assert as_pairs(read_pairs([f"{file}.gz"], "en", "de")) == PAIRS
    with pytest.raises(ValueError, match=r"no column 'source' but \['en', 'de'\]: give --source_column"):
        read_pairs([file])


def test_a_text_file_is_one_document_with_its_line_breaks(tmp_path):
    text = "ROMEO:\nHo!\n\n  Enter.\n"
    file = write(tmp_path / "play.txt.gz", text)
    rows = write(tmp_path / "rows.jsonl", '{"text": "one"}\n{"text": "two"}')
    assert list(read_texts([file, rows])["text"]) == [text, "one", "two"]


def test_windows_line_ends_and_byte_order_mark(tmp_path):
    file = tmp_path / "x.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert list(read_texts([str(file)])["text"]) == ["one\ntwo\n"]


def test_table_cells_stay_texts(tmp_path):
    rows = [("007", "NA"), ("1.50", "null"), ("True", "1e3")]
    for kind, separator in (("csv", ","), ("tsv", "\t")):
        lines = [separator.join(row) for row in [("source", "target"), *rows]]
        assert as_pairs(read_pairs([write(tmp_path / f"x.{kind}", "\n".join(lines))])) == rows
    numbers = write(tmp_path / "x.jsonl", '{"source": "a", "target": "b"}\n{"source": "c", "target": null}')
    with pytest.raises(ValueError, match="None instead of a text in column 'target' of row 2"):
        read_pairs([numbers])


def test_parallel_files_keep_empty_last_lines(tmp_path):
    sides = [write(tmp_path / name, text) for name, text in (("a", "one\n\n"), ("b", "eins\nzwei\n"))]
    assert as_pairs(read_pairs(sides)) == [("one", "eins"), ("", "zwei")]


def test_broken_files_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"x\.csv has 1 columns, not 2, in row 3: \['alone'\]"):
        read_pairs([write(tmp_path / "x.csv", "source,target\na,b\nalone")])
    with pytest.raises(ValueError, match=r"cannot read .*x\.jsonl: "):
        read_pairs([write(tmp_path / "x.jsonl", '{"source": "a"')])
    with pytest.raises(ValueError, match=r"cannot read .*x\.parquet: .*Parquet magic bytes"):
        read_pairs([write(tmp_path / "x.parquet", "no table" * 9)])
    (tmp_path / "x.txt.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"x\.txt\.gz is no whole gzip file"):
        read_texts([str(tmp_path / "x.txt.gz")])
    with pytest.raises(ValueError, match="cannot read .*: Is a directory"):
        read_texts([str(tmp_path)])


def test_bad_files_are_refused_by_name(tmp_path):
    short, long = write(tmp_path / "a.en", "one\ntwo"), write(tmp_path / "a.de", "eins\nzwei\ndrei")
    with pytest.raises(ValueError, match=r"a\.en has 2 lines but .*a\.de has 3: line n of one must be"):
        read_pairs([short, long])
    with pytest.raises(ValueError, match=r"cannot read .*missing\.txt: No such file"):
        read_texts([str(tmp_path / "missing.txt")])
    with pytest.raises(ValueError, match=r"empty\.txt is empty"):
        read_texts([write(tmp_path / "empty.txt", " \n")])
    with pytest.raises(ValueError, match="two parallel text files, not .*for --task causal-lm"):
        read_pairs([short, long, short])
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Käse".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 .*iconv"):
        read_texts([str(latin)])
    with pytest.raises(ValueError, match=r"no column 'text' but \['words'\]: give --text_column"):
        read_texts([write(tmp_path / "x.jsonl", '{"words": "one"}')])


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("ends_texts", [True, False])
def test_a_trained_tokenizer_decodes_what_it_encodes(kind, ends_texts, tmp_path):
    texts = ["the cat saw the dog", "a dog in 1987"]
    tokenizer = train_tokenizer(iter(texts), kind, 400, 64, ends_texts)
    tokenizer.save_pretrained(tmp_path)
    loaded = type(tokenizer).from_pretrained(tmp_path)
    for text in texts:
        ids = loaded(text)["input_ids"]
        assert ids == tokenizer(text)["input_ids"]
        assert (ids[-1] == loaded.eos_token_id) is ends_texts
        assert loaded.decode(ids, skip_special_tokens=True) == text
    assert [loaded.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS.values()] == [0, 1, 2, 3]
    assert loaded.padding_side == ("right" if ends_texts else "left")


def test_bpe_encodes_any_text_and_keeps_digits_apart():
    tokenizer = train_tokenizer(iter(["1987 1987 1987"]), "bpe", 300, 64, ends_texts=False)
    assert len(tokenizer("1987")["input_ids"]) == 4
    for text in ("猫 & кот", "line\nbreak\ttab", "  two  spaces  "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_an_unknown_tokenizer_is_refused():
    with pytest.raises(ValueError, match="'bbpe' is unknown"):
        train_tokenizer(iter(["x"]), "bbpe", 300, 64, ends_texts=False)


def test_long_pairs_are_left_out_with_their_texts():
    tokenizer = train_tokenizer(iter(["abcdefgh"]), "char", 50, 6, ends_texts=True)
    pairs = Dataset.from_dict({"source": ["abc", "abcdef", "a"], "target": ["ab", "a", "abcdef"]})
    kept = tokenize_pairs(pairs, tokenizer, 6)
    assert as_pairs(kept) == [("abc", "ab")]
    assert kept[0]["length"] == len(kept[0]["input_ids"]) + len(kept[0]["labels"]) == 4 + 3
    with pytest.raises(ValueError, match="all 3 pairs are longer than 1 tokens: raise --max_length"):
        tokenize_pairs(pairs, tokenizer, 1)


def test_blocks_predict_every_token_of_the_stream_once():
    tokenizer = train_tokenizer(iter(["abcdefghij"]), "char", 50, 6, ends_texts=False)
    texts = Dataset.from_dict({"text": ["abcde", "fghij"]})
    stream = [*tokenizer("abcde")["input_ids"], 2, *tokenizer("fghij")["input_ids"], 2]
    for max_length in (1, 4, 5, 11, 20):
        blocks = tokenize_stream(texts, tokenizer, max_length)["input_ids"]
        assert all(len(block) <= max_length + 1 for block in blocks)
        assert [token for block in blocks for token in block[1:]] == stream[1:]


def test_each_epoch_holds_every_example_once():
    lengths = [1 + index % 7 for index in range(40)]
    batches = list(UpdateSampler(lengths, 8, seed=3, numbers=range(20), pool=5))  # a pool is an epoch here
    epochs = [sum(batches[start : start + 5], []) for start in range(0, 20, 5)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("num_processes", [2, 3, 8])
def test_processes_share_the_batch_of_one_process(num_processes):
    lengths = [1 + index % 9 for index in range(50)]
    whole = list(UpdateSampler(lengths, 8, seed=1, numbers=range(30), pool=4))
    shares = [
        list(UpdateSampler(lengths, 8, 1, range(30), rank, num_processes, pool=4))
        for rank in range(num_processes)
    ]
    for update, batch in enumerate(whole):
        assert sorted(batch) == sorted(index for share in shares for index in share[update])


@pytest.mark.parametrize("start", [1, 7, 23])
def test_updates_continue_at_any_number(start):
    lengths = [1 + index % 9 for index in range(21)]  # an epoch ends inside a batch
    whole = list(UpdateSampler(lengths, 8, seed=1, numbers=range(30), pool=4))
    assert list(UpdateSampler(lengths, 8, seed=1, numbers=range(start, 30), pool=4)) == whole[start:]
    assert list(UpdateSampler(lengths, 8, seed=2, numbers=range(start, 30), pool=4)) != whole[start:]


def test_batches_hold_examples_of_about_one_length():
    lengths = torch.randint(1, 100, (1000,)).tolist()
    batches = list(UpdateSampler(lengths, 10, seed=0, numbers=range(50)))
    spread = [max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in batches]
    assert sum(spread) / len(spread) < 3  # about 80 without sorting


def test_collate_pads_inputs_and_labels():
    batch = collate(
        [{"input_ids": [5, 6, 7], "labels": [8]}, {"input_ids": [9], "labels": [3, 4]}], pad_token_id=1
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7], [9, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[8, -100], [3, 4]]
    assert collate([{"input_ids": [5, 1]}], pad_token_id=1)["labels"].tolist() == [[5, 1]]
