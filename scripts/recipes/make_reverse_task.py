"""
Writes the number-reversing task of JoeyNMT's tutorial: "3 17 49" -> "49 17 3", numbers below 50.

    python scripts/recipes/make_reverse_task.py runs/reverse-data

The same numbers as its own generator draws with its default seed: 50,000 sequences of up to 25 numbers to
train on, and 1,000 of up to 30 each for validation and test, so that some are longer than all in training.
"""

import argparse
from pathlib import Path

import numpy as np


SPLITS = {"train": (50_000, 25), "dev": (1_000, 30), "test": (1_000, 30)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="Where SPLIT.src and SPLIT.trg are written.")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.RandomState(42)
    for split, (count, longest) in SPLITS.items():
        rows = [random.randint(0, 50, random.randint(1, longest + 1)) for _ in range(count)]
        for side, step in (("src", 1), ("trg", -1)):
            text = "".join(" ".join(map(str, row[::step])) + "\n" for row in rows)
            (folder / f"{split}.{side}").write_text(text, encoding="utf-8")
    print(f"wrote {', '.join(SPLITS)} to {folder}")


if __name__ == "__main__":
    main()
