"""From examples to the batches of optimizer updates: epochs, streams, packed documents, processes' shares."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from datasets import Dataset, IterableDataset


Row = dict[str, Any]  # what was read: texts and labels as people write them
Example = dict[str, Any]  # what the model learns from: token ids, labels, and a `length` in tokens
Batch = dict[str, torch.Tensor]  # examples as the model takes them

POOL = 50  # batches among whose examples those of about one length are looked for
CHUNK_ROWS, CHUNK_CHARACTERS = 1000, 2**20  # most that are encoded together


@dataclass(frozen=True)
class Position:
    """
    Where training is in its data: all that is needed to go on there, as `asdict` and `Position(**state)`.

    Attributes:
        epoch: passes over the data that are behind, from 0.
        batch: batches behind in this epoch; of a stream, in the current pool.
        rows: of a stream: rows of this epoch that were read before the current pool.
    """

    epoch: int = 0
    batch: int = 0
    rows: int = 0


def mix(*numbers: int) -> int:
    """Returns a random-looking number below 2**56 that the numbers decide."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest(), "big")


def check_plan(
    lengths: torch.Tensor, batch_size: int | None, tokens_per_batch: int | None, first: int = 0
) -> None:
    """Raises ValueError for sizes that cannot work with examples of these lengths, counted from `first`."""
    given = [size for size in (batch_size, tokens_per_batch) if size is not None]
    if len(given) != 1 or given[0] < 1:
        raise ValueError(f"give batch_size or tokens_per_batch, not {batch_size} and {tokens_per_batch}")
    if tokens_per_batch is not None and len(lengths) and lengths.max() > tokens_per_batch:
        raise ValueError(
            f"example {first + int(lengths.argmax())} has {int(lengths.max())} tokens but a batch at most "
            f"{tokens_per_batch}: raise --tokens_per_batch, or lower --max_length"
        )


def cut_by_tokens(lengths: list[int], tokens_per_batch: int) -> list[int]:
    """Returns where batches begin if each takes what fits, every example costing as much as the longest."""
    starts, longest = [0], 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if longest * (index + 1 - starts[-1]) > tokens_per_batch:
            starts.append(index)
            longest = length
    return starts


def plan_epoch(
    lengths: torch.Tensor,
    seed: int,
    epoch: int,
    batch_size: int | None = None,
    tokens_per_batch: int | None = None,
) -> list[list[int]]:
    """
    Returns the batches of an epoch, each a list of example numbers; every example is in one of them.

    The order is drawn from seed and epoch alone. Within pools of `POOL` batches, examples of about one length
    meet; then the batches are shuffled. One batch of an epoch may be smaller than the others.

    Args:
        lengths: tokens of every example, (N,).
        batch_size: examples of a batch, over all processes.
        tokens_per_batch: instead: most tokens of a batch, over all processes, counted as if every example
            were as long as the longest.

    Raises:
        ValueError: an example is longer than `tokens_per_batch`.
    """
    check_plan(lengths, batch_size, tokens_per_batch)
    if not len(lengths):
        return []
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    order = torch.randperm(len(lengths), generator=generator)
    # in whole numbers: a float mean depends on the number of threads
    size = batch_size or max(1, tokens_per_batch * len(lengths) // int(lengths.sum()))
    pools, longest = torch.arange(len(lengths)) // (POOL * size), int(lengths.max())
    # every other pool falls in length, so that the batch which straddles two of them is of one length too
    height = torch.where(pools % 2 == 0, lengths[order], longest - lengths[order])
    order = order[(pools * (longest + 1) + height).argsort(stable=True)]
    if batch_size is not None:
        starts = list(range(0, len(order), batch_size))
    else:
        starts = cut_by_tokens(lengths[order].tolist(), tokens_per_batch)
    numbers, ends = order.tolist(), [*starts[1:], len(order)]
    drawn = torch.randperm(len(starts), generator=generator).tolist()
    return [numbers[starts[index] : ends[index]] for index in drawn]


def count_updates(
    lengths: torch.Tensor,
    seed: int,
    num_epochs: int,
    batch_size: int | None = None,
    tokens_per_batch: int | None = None,
) -> int:
    """Returns the number of batches of the first epochs; arguments as for `plan_epoch`."""
    if batch_size is not None and tokens_per_batch is None:
        return num_epochs * -(-len(lengths) // batch_size)
    plans = (plan_epoch(lengths, seed, epoch, batch_size, tokens_per_batch) for epoch in range(num_epochs))
    return sum(map(len, plans))


@dataclass
class MapBatches:
    """
    The batches of one epoch after the other, without end, of examples that are reached by number.

    Every example has a `draw`: a number of its own in this epoch, to seed what is drawn for it.

    Args:
        examples: with a column `length`.
        batch_size, tokens_per_batch: as for `plan_epoch`.

    Raises:
        ValueError: there are no examples, or one is longer than `tokens_per_batch`.
    """

    examples: Dataset
    seed: int
    batch_size: int | None = None
    tokens_per_batch: int | None = None

    def __post_init__(self):
        if not len(self.examples):
            raise ValueError("there are no examples to make batches of")
        self.lengths = torch.as_tensor(self.examples.with_format("numpy")["length"][:], dtype=torch.long)
        check_plan(self.lengths, self.batch_size, self.tokens_per_batch)

    def fetch(self, epoch: int, numbers: list[int]) -> list[Example]:
        """Returns the examples with these numbers."""
        columns = self.examples[numbers]
        draws = [mix(self.seed, epoch, number) for number in numbers]
        rows = zip(*columns.values(), draws, strict=True)
        return [dict(zip([*columns, "draw"], row, strict=True)) for row in rows]

    def after(self, position: Position) -> Iterator[tuple[list[Example], Position]]:
        """Yields, from `position` on, the examples of each batch and the position after it."""
        epoch, done = position.epoch, position.batch
        while True:
            plan = plan_epoch(self.lengths, self.seed, epoch, self.batch_size, self.tokens_per_batch)
            for batch in range(done, len(plan)):
                yield self.fetch(epoch, plan[batch]), Position(epoch, batch + 1)
            epoch, done = epoch + 1, 0


def read_chunk(rows: Iterator[Row]) -> list[Row]:
    """Returns the next rows, few enough to encode them together; none at the end."""
    chunk, characters = [], 0
    for row in rows:
        chunk.append(row)
        characters += len(str(row))
        if len(chunk) >= CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
            break
    return chunk


@dataclass
class StreamBatches:
    """
    The batches of one pass over a stream after the other, without end.

    In memory are the rows of about `POOL` batches. Such a pool is batched like an epoch of its own, so that
    one batch of each may be smaller. Examples have a `draw`, as in `MapBatches`.

    Args:
        rows: read from the beginning in every epoch, always in the same order.
        encode: makes examples, each with a `length`, of some rows.
        batch_size, tokens_per_batch: as for `plan_epoch`.
    """

    rows: IterableDataset
    encode: Callable[[list[Row]], list[Example]]
    seed: int
    batch_size: int | None = None
    tokens_per_batch: int | None = None

    def __post_init__(self):
        check_plan(torch.tensor([]), self.batch_size, self.tokens_per_batch)

    def read_pools(self, first: int) -> Iterator[tuple[list[Example], int]]:
        """Yields the examples of the pools from row `first` on, and the number of the row after each."""
        rows, examples, size, end = iter(self.rows.skip(first)), [], 0, first
        while chunk := read_chunk(rows):
            encoded = self.encode(chunk)
            examples += encoded
            size += len(encoded) if self.batch_size else sum(example["length"] for example in encoded)
            end += len(chunk)
            if size >= POOL * (self.batch_size or self.tokens_per_batch):
                yield examples, end
                examples, size = [], 0
        if examples:
            yield examples, end

    def plan_pool(self, examples: list[Example], epoch: int, first: int) -> list[list[Example]]:
        """Returns the batches of a pool that begins with row `first`."""
        lengths = torch.tensor([example["length"] for example in examples])
        check_plan(lengths, self.batch_size, self.tokens_per_batch, first)
        draws = [mix(self.seed, epoch, first, number) for number in range(len(examples))]
        plan = plan_epoch(lengths, mix(self.seed, first), epoch, self.batch_size, self.tokens_per_batch)
        return [[{**examples[number], "draw": draws[number]} for number in numbers] for numbers in plan]

    def after(self, position: Position) -> Iterator[tuple[list[Example], Position]]:
        """Yields what `MapBatches.after` does; raises ValueError if the stream has no examples."""
        epoch, first, done = position.epoch, position.rows, position.batch
        while True:
            is_empty = first == 0
            for examples, end in self.read_pools(first):
                is_empty, batches = False, self.plan_pool(examples, epoch, first)
                for batch in range(done, len(batches)):
                    yield batches[batch], Position(epoch, batch + 1, first)
                first, done = end, 0
            if is_empty:
                raise ValueError("the stream has no examples to make batches of")
            epoch, first = epoch + 1, 0


def split_batch(
    examples: list[Example], process_index: int, num_processes: int, pieces: int
) -> list[list[Example]]:
    """
    Returns one process's part of a batch, in so many pieces; all parts together hold each example once.

    The pieces which the processes compute at the same time are of about one length. Where examples are fewer
    than pieces, some are empty.
    """
    ordered = sorted(examples, key=lambda example: -example["length"])
    edges = [len(ordered) * piece // pieces for piece in range(pieces + 1)]
    return [ordered[start:end][process_index::num_processes] for start, end in pairwise(edges)]


def rank_shares(
    lengths: Sequence[int], batch_size: int, process_index: int, num_processes: int
) -> list[list[int]]:
    """Returns one process's batches of example numbers, longest first, for evaluating each example once."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    mine = order[process_index::num_processes]
    return [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]


def pack(documents: Iterable[tuple[list[int], bool]], length: int) -> list[Example]:
    """
    Returns documents, set end to end and cut into blocks of `length` + 1 tokens; the last may be shorter.

    Neighbouring blocks share one token, so that a causal model predicts each token once, from at most
    `length` others. `position_ids` begin anew with each document and block; `labels` leave out what stands
    there, since nothing that could predict it is seen.

    Args:
        documents: pieces of documents, and whether a document ends with the piece.
    """
    ids: list[int] = []
    positions: list[int] = []
    position = 0
    for piece, ends in documents:
        ids += piece
        positions += range(position, position + len(piece))
        position = 0 if ends else position + len(piece)
    blocks = []
    for start in range(0, len(ids) - 1, length):
        block = ids[start : start + length + 1]
        position_ids = [min(pair) for pair in enumerate(positions[start : start + length + 1])]
        labels = [token if position else -100 for token, position in zip(block, position_ids, strict=True)]
        columns = {"input_ids": block, "position_ids": position_ids, "labels": labels}
        blocks.append({**columns, "length": len(block)})
    return blocks
