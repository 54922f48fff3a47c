"""Tests of the readers of local files: what each kind of file holds, and how broken ones are refused."""

import gzip
import json
import tracemalloc

import pyarrow
import pytest
from pyarrow import parquet

from hf_transformer_block.reading import kind_of, pick, read_columns, read_lines, read_pieces, read_records


PAIRS = [
    ("a cat", "eine Katze"),
    ('say "no", twice', "sag „nein“,  zweimal"),
    ("猫", "chat | кот"),
    ("007", "NA"),
]
ROWS = [dict(zip(("source", "target"), pair, strict=True)) for pair in PAIRS]
SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "Cats",
            "paragraphs": [
                {
                    "context": "A cat sleeps.",
                    "qas": [
                        {"id": "1", "question": "Who?", "answers": [{"text": "A cat", "answer_start": 0}]},
                        {"id": "2", "question": "Why?", "answers": [], "is_impossible": True},
                    ],
                },
                {"context": "Dogs bark.", "qas": [{"id": "3", "question": "What?"}]},
            ],
        }
    ],
}


def write(path, text: str | bytes) -> str:
    """Writes a text, gzipped if the name ends so, and returns the path."""
    raw = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


def tables() -> dict[str, str | bytes]:
    """Returns `ROWS` as files of every kind."""
    quoted = ['"' + '","'.join(text.replace('"', '""') for text in pair) + '"' for pair in PAIRS]
    buffer = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), buffer)
    return {
        "x.jsonl": "\n".join(map(json.dumps, ROWS)),
        "list.json": json.dumps(ROWS, indent=1),
        "lines.json": "\n".join(map(json.dumps, ROWS)) + "\n",
        "data.json": json.dumps({"data": ROWS}),
        "x.csv": "source,target\n" + "\n".join(quoted),
        "windows.csv": "\ufeffsource,target\r\n" + "\r\n".join(quoted) + "\r\n",
        "x.tsv": "\n".join("\t".join(pair) for pair in [("source", "target"), *PAIRS]) + "\n",
        "headerless.tsv": "\n".join("\t".join(pair) for pair in PAIRS),
        "x.parquet": buffer.getvalue().to_pybytes(),
    }


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", tables())
def test_every_kind_of_table_gives_the_same_rows(tmp_path, name, suffix):
    file = write(tmp_path / f"{name}{suffix}", tables()[name])
    assert list(read_records(file, ["source", "target"])) == ROWS


def test_the_name_tells_the_kind():
    names = ("a.jsonl.gz", "b.json", "c.csv", "d.tsv.gz", "e.parquet", "train.en.gz", "f.conll", "g.gz")
    kinds = ["jsonl", "json", "csv", "tsv", "parquet", "text", "text", "text"]
    assert list(map(kind_of, names)) == kinds


def test_questions_of_squad_are_flattened(tmp_path):
    rows = list(read_records(write(tmp_path / "x.json.gz", json.dumps(SQUAD))))
    assert [row["id"] for row in rows] == ["1", "2", "3"]
    assert [row["context"] for row in rows] == ["A cat sleeps."] * 2 + ["Dogs bark."]
    assert rows[0]["answers"] == {"text": ["A cat"], "answer_start": [0]}
    assert rows[1]["answers"] == rows[2]["answers"] == {"text": [], "answer_start": []}


def test_a_field_may_be_longer_than_the_csv_module_allows(tmp_path):
    text = "word " * 100_000
    assert list(read_records(write(tmp_path / "x.csv", f'text\n"{text}"'))) == [{"text": text}]


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.jsonl"])
def test_a_blank_line_is_an_empty_row(tmp_path, name):
    lines = {"x.csv": "a,b\n1,2", "x.tsv": "a\tb\n1\t2", "x.jsonl": '{"a": "1", "b": "2"}'}[name]
    rows = list(read_records(write(tmp_path / name, f"{lines}\n\n{lines.splitlines()[-1]}\n")))
    assert rows == [{"a": "1", "b": "2"}, {"a": "", "b": ""}, {"a": "1", "b": "2"}]


def test_lines_end_where_other_programs_end_them(tmp_path):
    lines = ["one", "", "two\u2028\x0b\x0chalf", " three ", ""]
    for name, end in (("unix", "\n"), ("windows.gz", "\r\n")):
        file = write(tmp_path / name, "\ufeff" + "".join(line + end for line in lines))
        assert list(read_lines(file)) == lines
    assert list(read_lines(write(tmp_path / "open", "one\ntwo"))) == ["one", "two"]
    assert list(read_lines(write(tmp_path / "latin", "one\nKäse".encode("latin-1")))) == ["one", "K\udce4se"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("width", [10, 65_535, 65_536, 200_000])
def test_pieces_make_up_the_document(tmp_path, end, width):
    words = "".join(f"{number} " for number in range(80_000))
    lines = [words[start : start + width] for start in range(0, len(words), width)]
    file = write(tmp_path / "x.txt.gz", end.join(lines))
    pieces, ends = zip(*read_pieces(file), strict=True)
    assert "".join(pieces) == "\n".join(lines)
    assert list(ends) == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 3
    assert max(map(len, pieces)) < 3 * 2**16
    limits = "\n" if width + len(end) <= 65_536 else "\n "
    assert all(piece[-1] in limits for piece in pieces[:-1])


def test_a_short_document_is_one_piece(tmp_path):
    assert list(read_pieces(write(tmp_path / "x", "ROMEO:\r\nHo!\r\n\r\n"))) == [("ROMEO:\nHo!\n\n", True)]
    assert list(read_pieces(write(tmp_path / "x", "猫" * 70_000)))[0] == ("猫" * 65_536, False)
    pieces = list(read_pieces(write(tmp_path / "x", "猫" * 65_535 + "\r\n猫")))  # \r and \n come one by one
    assert "".join(piece for piece, _ in pieces) == "猫" * 65_535 + "\n猫"


CONLL = """-DOCSTART- -X- O

# text = a comment
EU NNP B-ORG
# SYM O
rejects VBZ O
 \t
# newdoc
# SYM O

German JJ B-MISC
"""
CONLL_ROWS = [
    [["EU", "NNP", "B-ORG"], ["#", "SYM", "O"], ["rejects", "VBZ", "O"]],
    [["#", "SYM", "O"]],
    [["German", "JJ", "B-MISC"]],
]


@pytest.mark.parametrize("tab", [" ", "\t"])
def test_sentences_of_columns(tmp_path, tab):
    text = "\n".join(
        line if line.startswith(("# text", "# new", " ")) else line.replace(" ", tab)
        for line in CONLL.splitlines()
    )
    assert list(read_columns(write(tmp_path / "x.conll.gz", text))) == CONLL_ROWS
    with pytest.raises(ValueError, match=r"x\.conll has 1 columns, not 3, in line 3: \['alone'\]"):
        list(read_columns(write(tmp_path / "x.conll", "a b c\n\nalone\n")))
    with pytest.raises(ValueError, match=r"x\.conll has 2 columns, not 3, in line 2: \['#', 'O'\]"):
        list(read_columns(write(tmp_path / "x.conll", "a b c\n# O\n")))


BROKEN = {
    "x.csv": ("source,target\na,b\nalone\n", r"x\.csv has 1 columns, not 2, in line 3: \['alone'\]"),
    "open.csv": ('a,b\n1,"2\n3,4\n', r"cannot read .*open\.csv: line 3: unexpected end of data"),
    "x.tsv": ("source\ttarget\na\tb\tc", r"x\.tsv has 3 columns, not 2, in line 2"),
    "x.jsonl": ('{"a": "1"}\n{"a": "', r"cannot read .*x\.jsonl: line 2 is no JSON: Unterminated"),
    "list.jsonl": ('["a"]', r"cannot read .*list\.jsonl: line 1 is no object but '\[\"a\"\]'"),
    "x.json": ("[1, 2]", r"cannot read .*x\.json: it is neither a list of objects nor SQuAD's"),
    "half.json": ('[{"a": "1"}', r"cannot read .*half\.json: line 1 is no JSON"),
    "squad.json": (
        '{"data": [{"paragraphs": [{"qas": [{"id": "1"}]}]}]}',
        r"squad\.json: its articles are not those of SQuAD: KeyError\('context'\)",
    ),
    "x.parquet": ("no table" * 9, r"cannot read .*x\.parquet: .*Parquet magic bytes"),
    "x.txt": ("a", r"x\.txt is no table: name it \.csv"),
    "x.csv.gz": (gzip.compress(b"a,b\n1,2\n" * 999)[:-9], None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tables_are_refused_by_name(tmp_path, name):
    content, message = BROKEN[name]
    if message is None:
        (tmp_path / name).write_bytes(content)
        message = r"x\.csv\.gz is no whole gzip file: Compressed file ended"
    else:
        write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        list(read_records(str(tmp_path / name)))


@pytest.mark.parametrize("read", [read_lines, read_pieces, read_columns])
def test_unreadable_files_are_refused_by_name(tmp_path, read):
    whole = gzip.compress(b"a line\n" * 9999)
    for name, content in (
        ("no.gz", b"no gzip"),
        ("half.gz", whole[:-20]),
        ("bad.gz", whole[:10] + b"?" * 40),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} is no whole gzip file: "):
            list(read(str(tmp_path / name)))
    with pytest.raises(ValueError, match=r"cannot read .*missing\.txt: No such file"):
        list(read(str(tmp_path / "missing.txt")))
    with pytest.raises(ValueError, match="cannot read .*: Is a directory"):
        list(read(str(tmp_path)))


def test_a_blank_document_is_refused(tmp_path):
    for text in ("", " \n", "\n" * 200_000):
        with pytest.raises(ValueError, match=r"x\.txt is empty"):
            list(read_pieces(write(tmp_path / "x.txt", text)))


def test_columns_are_picked_by_name():
    raw = {"id": 1, "translation": {"en": "cat", "de": None}, "a.b": "whole"}
    assert pick(raw, "translation.en", "--source_column") == "cat"
    assert pick(raw, "translation.de", "--source_column") is None
    assert pick(raw, "a.b", "--source_column") == "whole"
    for name, known in (("text", r"\['id', 'translation', 'a\.b'\]"), ("translation.fr", r"\['en', 'de'\]")):
        with pytest.raises(ValueError, match=rf"no column '{name}' but {known}: give --text_column"):
            pick(raw, name, "--text_column")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("x.txt.gz", read_lines),
        ("x.txt.gz", read_pieces),
        ("x.csv.gz", read_records),
        ("x.tsv.gz", read_records),
    ],
)
def test_readers_need_little_memory(tmp_path, name, read):
    """20 MB are read with less than 2."""
    file = write(tmp_path / name, b"text\n" + (b"word " * 199 + b"end!\n") * 20_000)
    tracemalloc.start()
    size = sum(len(str(row)) for row in read(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 19e6
    assert peak < 2e6
