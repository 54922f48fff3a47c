"""
A page for a saved model: it translates, writes on, fills a gap, labels or answers, and shows its attention.

    python scripts/demo.py runs/en-de
    python scripts/demo.py runs/en-de --port 8000

The page fits the head that the folder holds. As app.py of a Space it reads the folder `model` beside it.
It runs the code beside the weights (`trust_remote_code=True`): serve folders that you trust.

Letters in shapes: L tokens.
"""

import argparse
import functools
import html
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any


try:
    import gradio
    import numpy
    import torch
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from transformers import (
        BatchEncoding,
        Pipeline,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        TextIteratorStreamer,
        pipeline,
    )
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is missing: pip install "hf_transformer_block[demo]"') from error

import plot_attention


BESIDE = Path(__file__).with_name("model")
LONGEST = 2048  # tokens of a text, also where the model itself has no limit
NEW_TOKENS = 64  # where the generation config of the folder does not say how many
LONGEST_ANSWER = 30  # tokens, as transformers' question answering had it
CANDIDATES = 5  # for a gap
BEAT = 0.5  # seconds, in which a user who has gone is noticed where no text appears
AT_ONCE = 4  # users whom the page serves at the same time; others wait


@dataclass(frozen=True, eq=False)  # the page draws another one, which gradio knows by its hash
class Reading:
    """What a model has read for a user, and, of an encoder-decoder, written: the picture shows it."""

    inputs: BatchEncoding
    written: torch.Tensor | None = None


# what is shown, and what was read once that is known
Answer = Iterator[tuple[Any, Reading | None]]


class Head:
    """A model with its tokenizer; the subclasses are the tasks, each a page of its own."""

    title = verb = ""
    fields: tuple[str, ...] = ("Text",)
    hint = ""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.model, self.tokenizer = model, tokenizer

    def encode(self, *texts: str) -> BatchEncoding:
        named = {field.lower(): text for field, text in zip(self.fields, texts, strict=True)}
        inputs = plot_attention.encode(self.tokenizer, self.model.config, named, LONGEST)
        return inputs.to(self.model.device)

    def pipeline(self, task: str, **options) -> Pipeline:
        """Returns transformers' pipeline, which without `device` would choose one and move the model."""
        return pipeline(task, model=self.model, tokenizer=self.tokenizer, device=self.model.device, **options)

    def output(self) -> gradio.components.Component:
        return gradio.Textbox(label="Answer", lines=3, interactive=False, elem_id="answer")

    def answer(self, *texts: str) -> Answer:
        """Yields what to show; raises ValueError, in a sentence for the user, for a text that does not do."""
        raise NotImplementedError


def beats(future: Future) -> Iterator[str]:
    """Yields nothing new, again and again until it is done: an answer can be ended only where it yields."""
    while not wait([future], timeout=BEAT).done:
        yield ""


class Writer(Head):
    """A head that writes: its text appears meanwhile; with beams, whose best is known last, at the end."""

    def write(self, inputs: BatchEncoding, **options) -> Generator[tuple[str, None], None, torch.Tensor]:
        """Generates in a thread; yields the text so far, as parts of an answer, and returns the ids."""
        is_decoder = not self.model.config.is_encoder_decoder
        has_beams = (self.model.generation_config.num_beams or 1) > 1
        read = {"skip_prompt": is_decoder, "skip_special_tokens": True}
        streamer = None if has_beams else TextIteratorStreamer(self.tokenizer, **read)
        is_gone = threading.Event()

        def stop(ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
            return torch.full((len(ids),), is_gone.is_set(), device=ids.device)

        def generate() -> torch.Tensor:
            try:
                return self.model.generate(**inputs, **options, streamer=streamer, stopping_criteria=[stop])
            finally:
                if streamer:
                    streamer.end()  # also where it fails: else the page would wait for ever

        text = ""
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(generate)
            try:
                for piece in streamer or beats(future):
                    text += piece
                    yield text, None
            finally:
                is_gone.set()  # a user who leaves ends the generation
            return future.result()[:1]


class Translator(Writer):
    """What an encoder-decoder writes for a text."""

    title, verb = "Translation", "Translate"

    def answer(self, text: str) -> Answer:
        inputs = self.encode(text)
        ids = yield from self.write(inputs, **plot_attention.length_options(self.model))
        yield self.tokenizer.decode(ids[0], skip_special_tokens=True), Reading(inputs, ids)


class Continuer(Writer):
    """What a decoder writes behind a text."""

    title, verb = "Text continuation", "Write on"

    def answer(self, text: str) -> Answer:
        inputs = self.encode(text)
        length, settings = inputs["input_ids"].shape[1], self.model.generation_config
        rest = settings.max_length - length if settings.max_length else NEW_TOKENS
        room = settings.max_new_tokens or rest
        if (limit := plot_attention.longest_input(self.model.config)) is not None:
            room = min(room, limit - length)
        if room < 1:
            raise ValueError(
                f"the text has {length} tokens, after which there is no room to write on: shorten it"
            )
        ids = yield from self.write(inputs, max_new_tokens=room)
        yield self.tokenizer.decode(ids[0, length:], skip_special_tokens=True), Reading(inputs)


class Filler(Head):
    """The likeliest tokens for the one gap of a text."""

    title, verb = "Fill the gap", "Fill"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        super().__init__(model, tokenizer)
        if tokenizer.mask_token is None:
            raise ValueError(
                "the tokenizer has no mask token, so that no gap can be written: save one with it"
            )
        self.hint = f"Write `{tokenizer.mask_token}` where a word is missing."
        self.fill = self.pipeline("fill-mask", top_k=CANDIDATES + len(tokenizer.all_special_ids))

    def output(self) -> gradio.components.Component:
        return gradio.Label(label="What may stand there", elem_id="answer")

    def answer(self, text: str) -> Answer:
        inputs = self.encode(text)
        gaps = int((inputs["input_ids"] == self.tokenizer.mask_token_id).sum())
        if gaps != 1:
            raise ValueError(
                f"the text has {gaps} gaps: write {self.tokenizer.mask_token} once, where one is"
            )
        no_words = set(self.tokenizer.all_special_ids)
        found = [one for one in self.fill(text) if one["token"] not in no_words][:CANDIDATES]
        ids = torch.tensor([candidate["token"] for candidate in found])
        names = plot_attention.name_tokens(self.tokenizer, ids)  # parts of characters would all look alike
        scores = [candidate["score"] for candidate in found]
        yield dict(zip(names, scores, strict=True)), Reading(inputs)


class Classifier(Head):
    """The labels of a text, with their probabilities."""

    title, verb = "Text classification", "Classify"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        super().__init__(model, tokenizer)
        self.classify = self.pipeline("text-classification", top_k=None)

    def output(self) -> gradio.components.Component:
        return gradio.Label(label="Label", num_top_classes=10, elem_id="answer")

    def answer(self, text: str) -> Answer:
        inputs = self.encode(text)
        (labels,) = self.classify([text])
        yield {label["label"]: label["score"] for label in labels}, Reading(inputs)


class Tagger(Head):
    """A text whose words are marked by their labels."""

    title, verb = "Token classification", "Mark"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        super().__init__(model, tokenizer)
        self.tag = self.pipeline("token-classification", aggregation_strategy="simple")

    def output(self) -> gradio.components.Component:
        return gradio.HighlightedText(label="Marked text", show_legend=True, elem_id="answer")

    def answer(self, text: str) -> Answer:
        inputs = self.encode(text)
        spans = [
            {"entity": span["entity_group"], "start": span["start"], "end": span["end"]}
            for span in self.tag(text)
        ]
        yield {"text": text, "entities": spans}, Reading(inputs)


class Answerer(Head):
    """The part of a text that most likely answers a question."""

    title, verb = "Question answering", "Answer"
    fields = ("Question", "Text")

    @torch.no_grad()
    def find(self, inputs: BatchEncoding, is_context: torch.Tensor) -> tuple[int, int]:
        """Returns the first and the last token of the likeliest answer inside the context."""
        outputs = self.model(**inputs)
        outside = torch.where(is_context, 0.0, -torch.inf).to(self.model.device)
        # (1, L) -> (L,); scores[i, j] is of the answer from i to j
        starts, ends = outputs.start_logits[0] + outside, outputs.end_logits[0] + outside
        scores = (starts[:, None] + ends[None, :]).float()
        allowed = torch.ones_like(scores, dtype=torch.bool).triu().tril(LONGEST_ANSWER - 1)
        best = int(scores.masked_fill(~allowed, -torch.inf).argmax())
        return divmod(best, len(starts))

    def answer(self, question: str, text: str) -> Answer:
        inputs = self.encode(question, text)
        encoded = self.tokenizer(question, text, return_offsets_mapping=True, verbose=False)
        is_context = torch.tensor([side == 1 for side in encoded.sequence_ids(0)])
        first, last = self.find(inputs, is_context)
        offsets = encoded["offset_mapping"]
        yield text[offsets[first][0] : offsets[last][1]].strip(), Reading(inputs)


HEADS = {
    "AutoModelForSeq2SeqLM": Translator,
    "AutoModelForCausalLM": Continuer,
    "AutoModelForMaskedLM": Filler,
    "AutoModelForSequenceClassification": Classifier,
    "AutoModelForTokenClassification": Tagger,
    "AutoModelForQuestionAnswering": Answerer,
}


def load_head(folder: Path) -> Head:
    """Returns the head that a folder holds; raises ValueError if there is no page for it."""
    config = plot_attention.load_config(folder)
    auto_class = plot_attention.find_auto_class(config)
    if auto_class not in HEADS:
        raise ValueError(f"{folder} holds {config.architectures[0]}, for which there is no page: save a head")
    tokenizer = plot_attention.load_tokenizer(folder)
    return HEADS[auto_class](plot_attention.load_model(folder, config), tokenizer)


def as_text(error: Exception) -> str:
    """Returns a message for the page, which takes it for HTML: "<mask>" would vanish, and users' text run."""
    return html.escape(str(error), quote=False)


def told(answer: Callable[..., Answer]) -> Callable[..., Iterator[tuple]]:
    """Returns an answer that first clears the page, and whose errors the page shows."""

    @functools.wraps(answer)
    def tell(*texts: str) -> Iterator[tuple]:
        yield None, None, None  # what an earlier text has left does not fit this one
        try:
            for shown, reading in answer(*(text or "" for text in texts)):
                yield shown, reading, None
        except ValueError as error:
            raise gradio.Error(as_text(error), print_exception=False) from error

    return tell


def picture(head: Head, reading: Reading | None, layer: int, which: int | None) -> numpy.ndarray | None:
    """Returns the picture of a reading, None if there is none to draw."""
    if reading is None:
        return None
    try:
        attention = plot_attention.read_attention(
            head.model, head.tokenizer, reading.inputs, reading.written, layer=layer, head=which
        )
    except ValueError as error:
        gradio.Warning(f"No picture: {as_text(error)}")
        return None
    canvas = FigureCanvasAgg(plot_attention.draw(attention))
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())[..., :3].copy()


def choices(head: Head) -> tuple[gradio.Dropdown, gradio.Dropdown]:
    """Returns the fields in which a user chooses a layer and a head."""
    config = head.model.config
    layers = config.num_decoder_layers if config.is_encoder_decoder else config.num_hidden_layers
    heads = [("mean of all", -1), *((str(number), number) for number in range(config.num_attention_heads))]
    numbers = [(str(number), number) for number in range(layers)]
    layer = gradio.Dropdown(numbers, value=layers - 1, label="Layer", elem_id="layer")
    return layer, gradio.Dropdown(heads, value=-1, label="Head", elem_id="head")


def build_page(head: Head) -> gradio.Blocks:
    """Returns the page of a head: texts, answer, and the picture of the attention."""

    def show(reading: Reading | None, layer: int, which: int) -> numpy.ndarray | None:
        return picture(head, reading, layer, None if which < 0 else which)

    # nobody is told that the page runs, and pictures are deleted after an hour
    with gradio.Blocks(title=head.title, analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gradio.Markdown(f"# {head.title}\n\n{head.hint}")
        texts = [gradio.Textbox(label=field, lines=2, elem_id=field.lower()) for field in head.fields]
        button = gradio.Button(head.verb, variant="primary", elem_id="ask")
        output, reading = head.output(), gradio.State()
        with gradio.Row():
            layer, which = choices(head)
        look = {"format": "png", "interactive": False, "buttons": ["download", "fullscreen"]}
        image = gradio.Image(label="Attention", elem_id="attention", **look)
        starts = [button.click, *(text.submit for text in texts)]
        drawing = gradio.on(
            [reading.change, layer.change, which.change],
            show,
            [reading, layer, which],
            image,
            api_name=False,
        )
        # no picture of an older text; it stands first, for a page begins what follows when an answer ends
        gradio.on(starts, fn=None, cancels=drawing)
        gradio.on(starts, told(head.answer), texts, [output, reading, image], api_name="answer")
    return page.queue(default_concurrency_limit=AT_ONCE)


def port(text: str) -> int:
    """Returns a port that nobody uses; raises ArgumentTypeError."""
    try:
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", int(text)))
            return taken.getsockname()[1]
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text} is no port: give one from 1024 to 65535") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be used ({error.strerror}): give another") from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    optional = {"nargs": "?", "default": BESIDE} if BESIDE.is_dir() else {}
    parser.add_argument("folder", type=Path, **optional, help="What train.py or save_pretrained left.")
    parser.add_argument("--port", type=port, help="Without, the first free one from 7860.")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    try:
        page = build_page(load_head(arguments.folder))
        page.launch(server_port=arguments.port, share=False)
    except (ValueError, OSError) as error:
        raise SystemExit(f"demo.py: {error}") from error


if __name__ == "__main__":
    main()
