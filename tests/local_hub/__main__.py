"""Runs the local Hub from the folder tests: `python -m local_hub --root DIR --token hf_alice=alice`."""

import argparse
import contextlib
import logging
import threading
from pathlib import Path

from .hub import LocalHub


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m local_hub", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the folder that holds everything")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--token", action="append", default=[], metavar="TOKEN=USER[:read]")
    parser.add_argument("--xet", action="store_true", help="without it, clients need HF_HUB_DISABLE_XET=1")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokens = dict(token.split("=", 1) for token in args.token)
    with LocalHub(args.root, tokens, args.port, args.xet) as hub, contextlib.suppress(KeyboardInterrupt):
        logging.info("HF_ENDPOINT=%s", hub.url)
        threading.Event().wait()


if __name__ == "__main__":
    main()
