"""From files to batches: read, train a tokenizer, tokenise, choose the examples of each update, collate."""

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOKENIZERS = ("bpe", "char", "word")
READERS = {
    ".txt": "text",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}


def read_pairs(files: list[str], source_column: str = "source", target_column: str = "target") -> Dataset:
    """
    Reads pairs of texts, "source" and "target", from one file with two columns or from two parallel files.

    A .tsv without a header that names the columns is source, tab, target. Any file may be gzipped.

    Raises:
        ValueError: a file is missing, empty or lacks a column, or parallel files differ in length.
    """
    if len(files) == 2:
        sides = [read_columns(file)["text"] for file in files]
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"{files[0]} has {len(sides[0])} lines but {files[1]} has {len(sides[1])}: line n of one "
                f"must be the translation of line n of the other"
            )
        return Dataset.from_dict({"source": list(sides[0]), "target": list(sides[1])})
    if len(files) != 1:
        raise ValueError(
            f"translation reads one file with two columns or two parallel files, not {len(files)}"
        )
    dataset = read_columns(files[0], header=[source_column, target_column])
    for column in (source_column, target_column):
        if column not in dataset.column_names:
            raise ValueError(
                f"{files[0]} has no column {column!r} but {dataset.column_names}: give --source_column and "
                f"--target_column"
            )
    dataset = dataset.select_columns([source_column, target_column])
    return dataset.rename_columns({source_column: "source", target_column: "target"})


def read_texts(files: list[str], text_column: str = "text") -> Dataset:
    """
    Reads documents as column "text"; a .txt file is one document, line breaks kept. Any file may be gzipped.

    Raises:
        ValueError: a file is missing, of an unknown kind, empty or lacks the column.
    """
    documents = []
    for file in files:
        if kind_of(file) == "text":
            documents.append(read_document(file))
            continue
        dataset = read_columns(file)
        if text_column not in dataset.column_names:
            raise ValueError(
                f"{file} has no column {text_column!r} but {dataset.column_names}: give --text_column"
            )
        documents += dataset[text_column]
    return Dataset.from_dict({"text": documents})


def kind_of(file: str) -> str:
    """Returns the kind of a data file by its name, .gz aside; raises ValueError if there is no such file."""
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"there is no file {file}")
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return READERS.get(suffix, "text")


def read_document(file: str) -> str:
    """Returns a whole text file, UTF-8."""
    raw = Path(file).read_bytes()
    try:
        text = (
            (gzip.decompress(raw) if file.endswith(".gz") else raw).decode("utf-8-sig").replace("\r\n", "\n")
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error}): convert it with iconv -t UTF-8") from error
    if not text.strip():
        raise ValueError(f"{file} is empty")
    return text


def read_columns(file: str, header: list[str] | None = None) -> Dataset:
    """Reads a table, or a text file's lines as column "text"; `header` names a headerless .tsv's columns."""
    kind = kind_of(file)
    if kind == "text":
        return Dataset.from_dict({"text": read_document(file).rstrip("\n").split("\n")})
    options = {}
    if ".tsv" in Path(file).suffixes:
        options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "keep_default_na": False}
        first = read_document(file).split("\n", 1)[0].rstrip("\r").split("\t")
        if header is not None and not set(header) <= set(first):
            options["column_names"] = header
    dataset = load_dataset(kind, data_files=file, split="train", **options)
    if not len(dataset):
        raise ValueError(f"{file} is empty")
    return dataset


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


def tokenise_pairs(
    pairs: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[Dataset, int]:
    """Returns `input_ids`, `labels` and their `length`, and how many pairs were longer than `max_length`."""

    def tokenise(batch: dict[str, list[str]]) -> dict[str, list]:
        sources = tokenizer(batch["source"], verbose=False)["input_ids"]
        targets = tokenizer(batch["target"], verbose=False)["input_ids"]
        kept = [
            (source, target)
            for source, target in zip(sources, targets, strict=True)
            if max(len(source), len(target)) <= max_length
        ]
        return {
            "input_ids": [source for source, _ in kept],
            "labels": [target for _, target in kept],
            "length": [len(source) + len(target) for source, target in kept],
        }

    tokenised = pairs.map(tokenise, batched=True, remove_columns=pairs.column_names, desc="tokenise")
    if not len(tokenised):
        raise ValueError(
            f"all {len(pairs)} pairs are longer than max_length={max_length} tokens: raise --max_length"
        )
    return tokenised, len(pairs) - len(tokenised)


def tokenise_stream(texts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """
    Returns documents, each ended by eos, set end to end and cut into blocks of `max_length` + 1 `input_ids`.

    Neighbouring blocks share one token, so that a causal model predicts each token of the stream once, from
    at most `max_length` others.
    """
    stream: list[int] = []
    for text in texts["text"]:
        stream += [
            *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
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
        start, stop: the first update, and the one after the last.
        pool: batches among which examples are sorted by length.
    """

    def __init__(
        self,
        lengths: list[int],
        batch_size: int,
        seed: int,
        start: int,
        stop: int,
        process_index: int = 0,
        num_processes: int = 1,
        pool: int = 50,
    ):
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.updates = range(start, stop)
        self.process_index = process_index
        self.num_processes = num_processes
        self.pool = pool

    def __len__(self) -> int:
        return len(self.updates)

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
        for update in self.updates:
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
