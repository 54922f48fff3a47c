"""From files to batches: read, train a tokenizer, tokenize, choose the examples of each update, collate."""

import csv
import gzip
import io
from collections.abc import Iterator
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from pyarrow import ArrowInvalid, parquet
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOKENIZERS = ("bpe", "char", "word")
KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}


def kind_of(file: str) -> str:
    """Returns a file's kind by its name, .gz aside: "json", "csv", "tsv", "parquet", else "text"."""
    path = Path(file)
    return KINDS.get(Path(path.stem).suffix if path.suffix == ".gz" else path.suffix, "text")


def read_bytes(file: str) -> bytes:
    """Returns a whole file, unzipped; raises ValueError if it cannot be read."""
    try:
        raw = Path(file).read_bytes()
        return gzip.decompress(raw) if file.endswith(".gz") else raw
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{file} is no whole gzip file: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error


def read_document(file: str) -> str:
    """Returns a whole text file, UTF-8, with Unix line ends."""
    try:
        text = read_bytes(file).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error}): convert it with iconv -t UTF-8") from error
    if not text.strip():
        raise ValueError(f"{file} is empty")
    return text


def read_delimited(file: str, columns: list[str]) -> dict[str, list[str]]:
    """Returns all columns of a .csv or .tsv; a .tsv without a header that names `columns` holds just them."""
    is_tsv = kind_of(file) == "tsv"
    options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tsv else {}
    try:
        rows = [row for row in csv.reader(io.StringIO(read_document(file), newline=""), **options) if row]
    except csv.Error as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    has_header = not is_tsv or set(columns) <= set(rows[0])
    header, rows = (rows[0], rows[1:]) if has_header else (columns, rows)
    for number, row in enumerate(rows, start=1 + has_header):
        if len(row) != len(header):
            raise ValueError(f"{file} has {len(row)} columns, not {len(header)}, in row {number}: {row}")
    return {name: [row[index] for row in rows] for index, name in enumerate(header)}


def read_table(file: str, columns: list[str], flags: str) -> list[list[str]]:
    """Returns columns of a table as texts; `flags` are those which name the columns, for the error."""
    kind = kind_of(file)
    raw = read_bytes(file)
    try:
        if kind in ("csv", "tsv"):
            table = read_delimited(file, columns)
        elif kind == "parquet":
            table = parquet.read_table(io.BytesIO(raw)).to_pydict()
        else:
            table = load_dataset(kind, data_files=file, split="train").to_dict()
    except (DatasetGenerationError, ArrowInvalid) as error:
        raise ValueError(f"cannot read {file}: {error.__cause__ or error}") from error
    for name in columns:
        if name not in table:
            raise ValueError(f"{file} has no column {name!r} but {list(table)}: give {flags}")
        wrong = [number for number, value in enumerate(table[name], start=1) if not isinstance(value, str)]
        if wrong:
            value = table[name][wrong[0] - 1]
            raise ValueError(f"{file} has {value!r} instead of a text in column {name!r} of row {wrong[0]}")
    if not table[columns[0]]:
        raise ValueError(f"{file} is empty")
    return [table[name] for name in columns]


def read_pairs(files: list[str], source_column: str = "source", target_column: str = "target") -> Dataset:
    """
    Reads pairs of texts, "source" and "target", from one file with two columns or from two parallel files.

    A .tsv without a header that names the columns is source, tab, target. Any file may be gzipped.

    Raises:
        ValueError: a file is missing, empty or lacks a column, or parallel files differ in length.
    """
    if len(files) == 2:
        sides = [read_document(file).removesuffix("\n").split("\n") for file in files]
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"{files[0]} has {len(sides[0])} lines but {files[1]} has {len(sides[1])}: line n of one "
                f"must be the translation of line n of the other"
            )
    elif len(files) == 1 and kind_of(files[0]) != "text":
        sides = read_table(files[0], [source_column, target_column], "--source_column and --target_column")
    else:
        raise ValueError(
            f"translation reads one table with two columns (jsonl, csv, tsv, parquet) or two parallel text "
            f"files, not {', '.join(files)}; a text by itself is for --task causal-lm"
        )
    return Dataset.from_dict({"source": sides[0], "target": sides[1]})


def read_texts(files: list[str], text_column: str = "text") -> Dataset:
    """
    Reads documents as column "text"; a text file is one document, line breaks kept.

    Raises:
        ValueError: a file is missing, empty or lacks the column.
    """
    documents = []
    for file in files:
        is_text = kind_of(file) == "text"
        documents += [read_document(file)] if is_text else read_table(file, [text_column], "--text_column")[0]
    return Dataset.from_dict({"text": documents})


def untrained_tokenizer(kind: str) -> Tokenizer:
    """Returns a tokenizer without vocabulary; raises ValueError for an unknown kind."""
    if kind not in TOKENIZERS:
        raise ValueError(f"tokenizer kind {kind!r} is unknown (known: {', '.join(TOKENIZERS)})")
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
    tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "char":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
    return tokenizer


def train_tokenizer(
    texts: Iterator[str], kind: str, vocab_size: int, max_length: int, ends_texts: bool
) -> PreTrainedTokenizerFast:
    """
    Trains a tokenizer that AutoTokenizer loads: "bpe" (byte-level, digits apart), "char" or "word".

    With `ends_texts` an encoded text ends with `</s>`, as a translation model needs; without, a language
    model can go on writing. `vocab_size` is an upper limit; "char" and "word" keep the most frequent.
    """
    tokenizer = untrained_tokenizer(kind)
    options = {"vocab_size": vocab_size, "special_tokens": [*SPECIAL_TOKENS.values()], "show_progress": False}
    if kind == "bpe":
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    else:
        trainer = trainers.WordLevelTrainer(**options)
    tokenizer.train_from_iterator(texts, trainer)
    if ends_texts:
        eos = SPECIAL_TOKENS["eos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {eos}", special_tokens=[(eos, tokenizer.token_to_id(eos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        padding_side="right" if ends_texts else "left",
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS,
    )


def tokenize_pairs(pairs: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """
    Returns the pairs that fit into `max_length` with their `input_ids`, `labels` and joint `length`.

    Raises:
        ValueError: no pair fits.
    """

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list]:
        sources = tokenizer(batch["source"], verbose=False)["input_ids"]
        targets = tokenizer(batch["target"], verbose=False)["input_ids"]
        rows = zip(batch["source"], batch["target"], sources, targets, strict=True)
        kept = [row for row in rows if max(len(row[2]), len(row[3])) <= max_length]
        names = ("source", "target", "input_ids", "labels")
        columns = {name: [row[index] for row in kept] for index, name in enumerate(names)}
        return {**columns, "length": [len(source) + len(target) for *_, source, target in kept]}

    tokenized = pairs.map(tokenize, batched=True, remove_columns=pairs.column_names, desc="tokenize")
    if not len(tokenized):
        raise ValueError(f"all {len(pairs)} pairs are longer than {max_length} tokens: raise --max_length")
    return tokenized


def tokenize_stream(texts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """
    Returns documents, each ended by eos, set end to end and cut into blocks of `max_length` + 1 `input_ids`.

    Neighbouring blocks share one token, so that a causal model predicts each token of the stream once, from
    at most `max_length` others.

    Raises:
        ValueError: the documents have less than two tokens.
    """
    stream: list[int] = []
    for text in texts["text"]:
        stream += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        stream.append(tokenizer.eos_token_id)
    if len(stream) < 2:
        raise ValueError("a language model needs at least two tokens of text")
    blocks = [stream[start : start + max_length + 1] for start in range(0, len(stream) - 1, max_length)]
    return Dataset.from_dict({"input_ids": blocks, "length": [len(block) for block in blocks]})


class UpdateSampler(Sampler[list[int]]):
    """
    Yields, for every optimizer update, the examples which this process contributes to its batch.

    Epoch after epoch in one endless shuffled stream, so that every batch is full; examples of about one
    length meet in a batch. Update n depends on `seed` and n alone: any number of processes shares the same
    batch, and training resumes at any update without reading what came before.

    Args:
        lengths: tokens of every example.
        batch_size: examples of an update, over all processes.
        numbers: of the updates to yield, from 0.
        pool: batches among which examples are sorted by length.
    """

    def __init__(
        self,
        lengths: list[int],
        batch_size: int,
        seed: int,
        numbers: range,
        process_index: int = 0,
        num_processes: int = 1,
        pool: int = 50,
    ):
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.numbers = numbers
        self.process_index = process_index
        self.num_processes = num_processes
        self.pool = pool

    def __len__(self) -> int:
        return len(self.numbers)

    def generator(self, *numbers: int) -> torch.Generator:
        """Returns a random generator that depends on the seed and the numbers."""
        mixed = self.seed
        for number in numbers:
            mixed = (mixed * 1_000_003 + number + 1) % 2**63
        return torch.Generator().manual_seed(mixed)

    def pool_batches(self, pool: int) -> list[list[int]]:
        """Returns the batches of one pool: a stretch of the stream, sorted by length, cut, and shuffled."""
        size, total = self.pool * self.batch_size, len(self.lengths)
        epochs = range(pool * size // total, ((pool + 1) * size - 1) // total + 1)
        stream = torch.cat([torch.randperm(total, generator=self.generator(0, epoch)) for epoch in epochs])
        first = pool * size - epochs[0] * total
        stretch = stream[first : first + size]
        stretch = stretch[self.lengths[stretch].argsort(stable=True)]
        order = torch.randperm(self.pool, generator=self.generator(1, pool))
        return stretch.view(self.pool, self.batch_size)[order].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        batches, current = [], None
        for update in self.numbers:
            if update // self.pool != current:
                current = update // self.pool
                batches = self.pool_batches(current)
            yield batches[update % self.pool][self.process_index :: self.num_processes]


def collate(examples: list[dict[str, list[int]]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pads to the longest: `input_ids` with the pad id, `labels` (without any: the inputs) with -100."""
    inputs = [torch.tensor(example["input_ids"]) for example in examples]
    labels = [torch.tensor(example.get("labels", example["input_ids"])) for example in examples]
    padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True, padding_value=pad_token_id)
    lengths = torch.tensor([len(ids) for ids in inputs])
    return {
        "input_ids": padded,
        "attention_mask": (torch.arange(padded.shape[1]) < lengths.unsqueeze(1)).long(),
        "labels": torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
    }
