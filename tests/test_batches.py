"""Tests of the way from examples to updates: epochs, streams, going on in them, shares, packed documents."""

import json
from dataclasses import asdict
from itertools import takewhile

import pytest
import torch
from conftest import POSITIONS, tiny_config, tiny_tokens
from datasets import Dataset, IterableDataset, load_dataset
from torch.testing import assert_close

from hf_transformer_block import TransformerBlockForCausalLM, batches
from hf_transformer_block.batches import (
    MapBatches,
    Position,
    StreamBatches,
    count_updates,
    mix,
    pack,
    plan_epoch,
    rank_shares,
    split_batch,
)


EPOCHS = 3
SIZES = ({"batch_size": 4}, {"tokens_per_batch": 20})
EACH_SIZE = pytest.mark.parametrize("size", SIZES, ids=lambda size: next(iter(size)))


def unequal(count: int) -> list[dict]:
    """Returns examples of 1 to 9 tokens."""
    return [
        {"row": row, "input_ids": list(range(1 + row * 7 % 9)), "length": 1 + row * 7 % 9}
        for row in range(count)
    ]


def encode(rows: list[dict]) -> list[dict]:
    """Makes no, one or two examples of a row, as bad rows and long contexts do."""
    numbers = [(row["number"], part) for row in rows for part in range(row["number"] % 3)]
    return [{"row": number, "part": part, "length": 1 + (number * 7 + part) % 9} for number, part in numbers]


def number_rows(shards: list[range]):
    """Yields the rows of a stream."""
    for shard in shards:
        for number in shard:
            yield {"number": number}


def stream_of_shards(tmp_path) -> IterableDataset:
    shards = [range(start, start + 10) for start in range(0, 40, 10)]
    return IterableDataset.from_generator(number_rows, gen_kwargs={"shards": shards})


def stream_of_files(tmp_path) -> IterableDataset:
    for file, numbers in (("a", range(17)), ("b", range(17, 40))):
        (tmp_path / f"{file}.jsonl").write_text(
            "\n".join(json.dumps({"number": number}) for number in numbers)
        )
    files = [str(tmp_path / f"{file}.jsonl") for file in "ab"]
    return load_dataset("json", data_files=files, split="train", streaming=True)


@pytest.fixture
def small_pools(monkeypatch):
    """Makes pools so small that a stream of 40 rows has several."""
    monkeypatch.setattr(batches, "POOL", 2)
    monkeypatch.setattr(batches, "CHUNK_ROWS", 3)


def run(source: MapBatches | StreamBatches, position: Position | None = None) -> list:
    """Returns what is left of the first epochs."""
    return list(takewhile(lambda update: update[1].epoch < EPOCHS, source.after(position or Position())))


def epochs_of(updates: list[tuple[list[dict], Position]]) -> list[list[dict]]:
    """Returns the examples of each epoch."""
    return [
        [example for examples, position in updates if position.epoch == epoch for example in examples]
        for epoch in range(EPOCHS)
    ]


def saved(position: Position) -> Position:
    """Returns a position as it comes back from a checkpoint."""
    return Position(**json.loads(json.dumps(asdict(position))))


@EACH_SIZE
@pytest.mark.parametrize("count", [1, 4, 41, 400])
def test_a_plan_holds_every_example_once(size, count):
    lengths = torch.tensor([example["length"] for example in unequal(count)])
    plans = [plan_epoch(lengths, 3, epoch, **size) for epoch in range(EPOCHS)]
    assert all(sorted(sum(plan, [])) == list(range(count)) for plan in plans)
    assert plans == [plan_epoch(lengths, 3, epoch, **size) for epoch in range(EPOCHS)]
    assert count_updates(lengths, 3, EPOCHS, **size) == sum(map(len, plans))
    if count > 4:
        assert plans[0] != plans[1] != plans[2] != plans[0]
        assert plans[0] != plan_epoch(lengths, 4, 0, **size)


def test_batches_are_as_large_as_asked():
    lengths = torch.randint(1, 100, (1003,))
    plan = plan_epoch(lengths, 0, 0, batch_size=10)
    assert sorted(map(len, plan)) == [3, *[10] * 100]
    costs = [
        len(batch) * int(lengths[batch].max()) for batch in plan_epoch(lengths, 0, 0, tokens_per_batch=500)
    ]
    assert max(costs) <= 500
    assert sum(costs) / len(costs) > 450  # in a full batch there is no room for another of its longest


@pytest.mark.parametrize("size", [{"batch_size": 10}, {"tokens_per_batch": 500}])
def test_batches_hold_examples_of_about_one_length(size):
    lengths = torch.randint(1, 100, (2000,))
    plan = plan_epoch(lengths, 0, 0, **size)
    longest = [int(lengths[batch].max()) for batch in plan]
    padded = sum(len(batch) * length for batch, length in zip(plan, longest, strict=True))
    assert 1 - int(lengths.sum()) / padded < 0.03  # 0.45 without sorting
    rises = [before < after for before, after in zip(longest, longest[1:], strict=False)]
    turns = sum(before != after for before, after in zip(rises, rises[1:], strict=False))
    assert turns > len(plan) // 3  # the batches themselves are in no order


@pytest.mark.parametrize("size", [{}, {"batch_size": 4, "tokens_per_batch": 20}, {"batch_size": 0}])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match="give batch_size or tokens_per_batch, not"):
        plan_epoch(torch.tensor([3, 4]), 0, 0, **size)


def test_every_epoch_has_batches_of_its_own():
    lengths = torch.arange(1, 1001)  # sorted all together, they would meet the same neighbours in every epoch
    epochs = [set(map(tuple, plan_epoch(lengths, 0, epoch, batch_size=10))) for epoch in range(2)]
    assert len(epochs[0] & epochs[1]) < 10


def test_an_example_beyond_the_budget_is_named(small_pools):
    expected = "example {} has 9 tokens but a batch at most 8: raise --tokens_per_batch"
    with pytest.raises(ValueError, match=expected.format(5)):
        MapBatches(Dataset.from_list(unequal(40)), 0, tokens_per_batch=8)
    with pytest.raises(ValueError, match=expected.format(5)):
        plan_epoch(torch.tensor([example["length"] for example in unequal(40)]), 0, 0, tokens_per_batch=8)
    rows = IterableDataset.from_generator(number_rows, gen_kwargs={"shards": [range(40)]})
    stream = StreamBatches(
        rows, lambda rows: [{"length": 1 + row["number"] // 4} for row in rows], 0, None, 8
    )
    with pytest.raises(ValueError, match="example 3[2-5] has 9 tokens"):
        list(stream.after(Position()))


def test_nothing_to_learn_from_is_refused():
    with pytest.raises(ValueError, match="there are no examples"):
        MapBatches(Dataset.from_dict({"length": []}), 0, batch_size=4)
    rows = IterableDataset.from_generator(number_rows, gen_kwargs={"shards": [range(40)]})
    with pytest.raises(ValueError, match="the stream has no examples"):
        next(StreamBatches(rows, lambda rows: [], 0, batch_size=4).after(Position()))


@EACH_SIZE
def test_training_goes_on_anywhere_in_a_data_set(size):
    dataset = Dataset.from_list(unequal(60)).filter(lambda row: row["row"] % 3 != 1)  # rows are not numbers
    whole = run(MapBatches(dataset, 5, **size))
    assert len(whole) > 10
    for update, (_, position) in enumerate(whole):
        assert run(MapBatches(dataset, 5, **size), saved(position)) == whole[update + 1 :]
    examples = [{**example, "draw": None} for example in dataset]
    for epoch in epochs_of(whole):
        assert (
            sorted([{**example, "draw": None} for example in epoch], key=lambda example: example["row"])
            == examples
        )


@EACH_SIZE
@pytest.mark.parametrize("make_stream", [stream_of_shards, stream_of_files])
def test_training_goes_on_anywhere_in_a_stream(size, make_stream, tmp_path, small_pools):
    rows = make_stream(tmp_path)
    whole = run(StreamBatches(rows, encode, 5, **size))
    assert len({position.rows for _, position in whole}) > 2
    for update, (_, position) in enumerate(whole):
        assert run(StreamBatches(rows, encode, 5, **size), saved(position)) == whole[update + 1 :]
    examples = [(example["row"], example["part"]) for example in encode(list(rows))]
    orders = [[(example["row"], example["part"]) for example in epoch] for epoch in epochs_of(whole)]
    assert all(sorted(order) == examples for order in orders)
    assert orders[0] != orders[1]
    if "tokens_per_batch" in size:
        assert all(max(x["length"] for x in batch) * len(batch) <= 20 for batch, _ in whole)
    else:
        assert {len(batch) for batch, _ in whole} <= {1, 2, 3, 4}
    with pytest.raises(ValueError, match="give batch_size or tokens_per_batch"):
        StreamBatches(rows, encode, 5)


def test_a_stream_is_read_as_far_as_needed(small_pools, monkeypatch):
    read = []

    def lines(count: int):
        for number in range(count):
            read.append(number)
            yield {"text": "x" * 100}

    def measure(rows: list[dict]) -> list[dict]:
        return [{"length": 5} for _ in rows]

    rows = IterableDataset.from_generator(lines, gen_kwargs={"count": 1000})
    for characters, expected in ((10**6, 9), (150, 8)):  # chunks of 3 rows, or of 2 which pass 150 characters
        read.clear()
        monkeypatch.setattr(batches, "CHUNK_CHARACTERS", characters)
        next(StreamBatches(rows, measure, 0, batch_size=4).after(Position()))
        assert len(read) == expected


def test_every_pool_of_a_stream_is_shuffled_anew(small_pools, monkeypatch):
    monkeypatch.setattr(batches, "CHUNK_ROWS", 8)
    rows = IterableDataset.from_generator(number_rows, gen_kwargs={"shards": [range(16)]})
    source = StreamBatches(rows, lambda rows: [{**row, "length": 5} for row in rows], 0, batch_size=4)
    orders = [[example["number"] % 8 for example in epoch] for epoch in epochs_of(run(source))]
    pools = [tuple(order[start : start + 8]) for order in orders for start in (0, 8)]
    assert len({*pools, tuple(range(8))}) == 1 + 2 * EPOCHS


def test_every_example_draws_anew_in_every_epoch(small_pools, tmp_path):
    dataset = Dataset.from_list(unequal(40))
    by_count, by_tokens = ([*map(by_row, epochs_of(run(MapBatches(dataset, 5, **size))))] for size in SIZES)
    assert by_count == by_tokens  # the plan does not matter
    streamed = epochs_of(run(StreamBatches(stream_of_shards(tmp_path), encode, 5, batch_size=4)))
    for draws in (
        [draw for epoch in by_count for draw in epoch.values()],
        [example["draw"] for epoch in streamed for example in epoch],
    ):
        assert len(set(draws)) == len(draws) > 100
        assert all(0 <= draw < 2**56 for draw in draws)
    assert by_row(run(MapBatches(dataset, 6, batch_size=40))[0][0]) != by_count[0]
    assert mix(1, 2) == 0x91B0860DDBEE8F  # as Python's hash is not, the same in every process


def by_row(epoch: list[dict]) -> dict[int, int]:
    return {example["row"]: example["draw"] for example in epoch}


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 7, 64])
def test_processes_share_a_batch(num_processes, pieces, count):
    batch = unequal(count)
    shares = [split_batch(batch, rank, num_processes, pieces) for rank in range(num_processes)]
    assert all(len(share) == pieces for share in shares)
    held = [example["row"] for share in shares for piece in share for example in piece]
    assert sorted(held) == list(range(count))
    turns = [[share[piece] for share in shares] for piece in range(pieces)]
    assert max(max(map(len, turn)) - min(map(len, turn)) for turn in turns) <= 1  # no process waits long
    totals = [sum(map(len, turn)) for turn in turns]
    assert max(totals) - min(totals) <= 1
    lengths = [sorted(example["length"] for piece in turn for example in piece) for turn in turns]
    lengths = [turn for turn in lengths if turn]
    assert all(later[-1] <= earlier[0] for earlier, later in zip(lengths, lengths[1:], strict=False))


@pytest.mark.parametrize("num_processes", [1, 3])
def test_evaluation_shares_hold_every_example_once(num_processes):
    lengths = [example["length"] for example in unequal(40)]
    shares = [rank_shares(lengths, 6, rank, num_processes) for rank in range(num_processes)]
    assert sorted(number for share in shares for batch in share for number in batch) == list(range(40))
    for share in shares:
        assert all(len(batch) == 6 for batch in share[:-1])
        ordered = [lengths[number] for batch in share for number in batch]
        assert ordered == sorted(ordered, reverse=True)


DOCUMENTS = [
    list(range(100 * n, 100 * n + size)) for n, size in enumerate((5, 1, 9, 4, 23, 1, 1, 2), start=1)
]


@pytest.mark.parametrize("length", [1, 4, 5, 11, 45, 100])
def test_blocks_predict_every_token_of_every_document_once(length):
    blocks = pack([(document, True) for document in DOCUMENTS], length)
    assert all(block["length"] == len(block["input_ids"]) == length + 1 for block in blocks[:-1])
    assert 2 <= blocks[-1]["length"] <= length + 1
    stream = sum(DOCUMENTS, [])
    assert [token for block in blocks for token in block["input_ids"][1:]] == stream[1:]
    predicted = [label for block in blocks for label in block["labels"] if label != -100]
    assert predicted == [token for document in DOCUMENTS for token in document[1:]]
    place = {token: index for document in DOCUMENTS for index, token in enumerate(document)}
    for block in blocks:
        for offset, (token, position) in enumerate(
            zip(block["input_ids"], block["position_ids"], strict=True)
        ):
            assert position == min(offset, place[token])


@pytest.mark.parametrize("size", [1, 3, 7])
def test_documents_may_come_in_pieces(size):
    pieces = [
        (document[start : start + size], start + size >= len(document))
        for document in DOCUMENTS
        for start in range(0, len(document), size)
    ]
    whole = pack([(document, True) for document in DOCUMENTS], 8)
    assert pack(pieces, 8) == whole
    assert pack([pair for ids, ends in pieces for pair in ((ids, False), ([], ends))], 8) == whole
    assert pack([], 8) == pack([([5], True)], 8) == []


@pytest.mark.parametrize("position_embedding", POSITIONS)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(position_embedding, backend):
    config = tiny_config("decoder", position_embedding=position_embedding, attn_implementation=backend)
    model = TransformerBlockForCausalLM(config).double().eval()
    documents = [tiny_tokens(size).tolist() for size in (5, 1, 9, 4, 23, 1, 1, 3)]
    blocks = pack([(document, True) for document in documents], 15)
    stretches = [
        stretch
        for block in blocks
        for stretch in cut_where(block["input_ids"], [position == 0 for position in block["position_ids"]])
    ]
    assert len(stretches) == len(documents) + len(blocks) - 1  # every block begins inside a document
    alone = [model(input_ids=torch.tensor([stretch])) for stretch in stretches]
    full = [block for block in blocks if block["length"] == 16]
    assert len(full) == len(blocks) - 1 > 1
    packed, losses = [], []
    for together in (full, blocks[-1:]):
        inputs = {
            name: torch.tensor([block[name] for block in together])
            for name in ("input_ids", "position_ids", "labels")
        }
        output = model(**inputs, num_items_in_batch=1)
        packed += output.logits.flatten(0, 1)
        losses.append(output.loss)
    expected = torch.cat([output.logits[0] for output in alone])
    assert_close(torch.stack(packed), expected, atol=1e-12, rtol=0)
    likelihoods = [
        output.logits[0, :-1].log_softmax(-1)[range(len(stretch) - 1), stretch[1:]].sum()
        for output, stretch in zip(alone, stretches, strict=True)
    ]
    assert float(sum(losses)) == pytest.approx(-float(sum(likelihoods)), rel=1e-6)  # summed in float32


def cut_where(ids: list[int], begins: list[bool]) -> list[list[int]]:
    """Cuts a list before the places which are marked."""
    edges = [*(index for index, is_first in enumerate(begins) if is_first), len(ids)]
    return [ids[start:end] for start, end in zip(edges, edges[1:], strict=False)]
