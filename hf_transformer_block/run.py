"""A training run: model, data and loop, and what it logs, evaluates and saves on its way."""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, get_scheduler

from . import checkpoints, records, training
from .arguments import Arguments
from .batches import Example, MapBatches, Position, StreamBatches, count_updates
from .building import build_model
from .loading import REMEDY, report
from .tasks import Evaluator, Split, Task


NOT_FINITE = 5  # updates in a row without a finite loss and gradient, until a run gives up


def stream_batches(
    arguments: Arguments, task: Task, tokenizer: PreTrainedTokenizerBase, split: Split
) -> StreamBatches:
    """Returns the batches of a stream, encoded as it is read; counts what it drops."""

    def examples_of(chunk: list[dict]) -> list[dict]:
        columns = {name: [row[name] for row in chunk] for name in chunk[0]}
        encoded = task.encode(columns, tokenizer, is_training=True)
        examples = [dict(zip(encoded, values, strict=True)) for values in zip(*encoded.values(), strict=True)]
        bad = [example for example in examples if example["dropped"]]
        if bad and arguments.bad_rows == "error":
            row = next(row for row in chunk if row["row"] == bad[0]["row"])
            raise ValueError(
                f"the row that begins {task.texts(row)[0][:40]!r}: {bad[0]['dropped']}; {REMEDY}"
            )
        split.dropped.update(example["dropped"] for example in bad)
        return [example for example in examples if not example["dropped"]]

    return StreamBatches(split.rows, examples_of, arguments.seed, **batch_size(arguments))


def batch_size(arguments: Arguments) -> dict[str, int]:
    """Returns the size of a batch, in tokens or in examples."""
    if arguments.tokens_per_batch:
        return {"tokens_per_batch": arguments.tokens_per_batch}
    return {"batch_size": arguments.batch_size}


@dataclass
class Progress:
    """How far a run has come: with weights, optimizer and random states, all that a checkpoint holds."""

    step: int = 0
    position: dict[str, int] = field(default_factory=dict)  # in the data
    sums: dict[str, list[float]] = field(default_factory=lambda: {"log": [0.0, 0], "evaluation": [0.0, 0]})
    history: list[dict] = field(default_factory=list)  # of evaluations
    best_step: int | None = None
    best_score: float | None = None
    without_better: int = 0  # evaluations since the best one
    not_finite: int = 0  # updates in a row

    def add(self, loss: float) -> None:
        """Takes in the loss of an update."""
        for sums in self.sums.values():
            sums[0] += loss
            sums[1] += 1

    def mean_loss(self, since: str) -> float | None:
        """Returns the mean loss since the last "log" or "evaluation", and begins anew."""
        total, count = self.sums[since]
        self.sums[since] = [0.0, 0]
        return total / count if count else None

    def judge(self, score: float, more_is_better: bool) -> bool:
        """Returns whether an evaluation is the best so far, and takes note."""
        before = self.best_score
        is_better = before is None or (score > before if more_is_better else score < before)
        is_best = math.isfinite(score) and (is_better or score == before)  # of equals the later
        self.without_better = 0 if is_best and is_better else self.without_better + 1
        if is_best:
            self.best_step, self.best_score = self.step, score
        return is_best


def show(bar: tqdm, update: training.Update, learning_rate: float, speed: float, memory: int) -> None:
    """Moves the progress bar on."""
    bar.set_postfix_str(
        f"loss {update.loss:.3f}, lr {learning_rate:.2e}, {speed:,.0f} tokens/s, {memory / 2**30:.1f} GiB",
        refresh=False,
    )
    bar.update()


def describe(scores: dict) -> str:
    """Returns scores in one line; signatures are in metrics.json."""
    numbers = {name: score for name, score in scores.items() if isinstance(score, int | float)}
    return ", ".join(f"{name} {score:.5g}" for name, score in numbers.items())


class Run:
    """Everything that takes part in a training, and the steps of the loop that ask about step numbers."""

    def __init__(
        self,
        arguments: Arguments,
        accelerator: Accelerator,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        splits: dict[str, Split],
    ):
        self.arguments, self.accelerator, self.task = arguments, accelerator, task
        self.tokenizer, self.splits = tokenizer, splits
        self.folder = Path(arguments.output_dir)
        self.max_steps = arguments.max_steps
        if splits["train"].examples is None:
            self.batches = stream_batches(arguments, task, tokenizer, splits["train"])
        else:
            size = batch_size(arguments)
            self.batches = MapBatches(splits["train"].examples, arguments.seed, **size)
            if arguments.num_train_epochs:
                epochs = arguments.num_train_epochs
                self.max_steps = count_updates(self.batches.lengths, arguments.seed, epochs, **size)
        self.progress = Progress()
        self.log = records.MetricsLog(self.folder, accelerator.is_main_process)
        self.prepare()

    def prepare(self) -> None:
        """Makes model, optimizer and schedule, from the newest whole checkpoint or from the start."""
        arguments, accelerator = self.arguments, self.accelerator
        model = build_model(arguments, self.task, self.tokenizer)
        self.num_parameters = model.num_parameters()  # before an engine takes them apart
        if accelerator.distributed_type == DistributedType.FSDP and model.config.tie_word_embeddings:
            # one table is one module for both stacks, for FSDP2 shards a module's weights in one group
            model.set_input_embeddings(model.get_input_embeddings())
        optimizer = training.build_optimizer(model, arguments.learning_rate, arguments.weight_decay)
        warmup = arguments.warmup_steps
        warmup = min(200, self.max_steps // 10) if warmup is None else warmup
        self.scheduler = get_scheduler(
            arguments.lr_scheduler_type, optimizer, warmup, num_training_steps=self.max_steps
        )
        if plugin := getattr(accelerator.state, "deepspeed_plugin", None):
            # its engine keeps its own account of the loop, and sees no data loader to take this from
            plugin.deepspeed_config |= {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
                "gradient_clipping": arguments.max_grad_norm,
            }
        # the schedule is not prepared, so that it counts updates, not processes
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.average = None
        if arguments.ema_decay:
            self.average = training.ExponentialMovingAverage(self.model.parameters(), arguments.ema_decay)
        checkpoints.register_state(accelerator, self.scheduler, *filter(None, [self.average]))
        set_seed(arguments.seed, device_specific=True)
        if arguments.resume:
            state = checkpoints.load_newest(accelerator, self.folder)
            self.progress = Progress(**state) if state else self.progress
            accelerator.print(
                f"continuing after update {self.progress.step}"
                if state
                else "no checkpoint yet: beginning anew"
            )
            self.log.truncate(self.progress.step)

    @property
    def metric(self) -> str:
        """The score that decides which evaluation is the best."""
        return self.arguments.metric_for_best_model or next(iter(self.task.metrics))

    @property
    def final_split(self) -> str:
        """The name of the split that the saved model is scored on."""
        return "test" if "test" in self.splits else "validation"

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to train."""
        patience = self.arguments.early_stopping_patience
        has_stopped = patience is not None and self.progress.without_better >= patience
        return has_stopped or self.progress.step >= self.max_steps

    def evaluator(self, num_pairs: int | None, num_beams: int) -> Evaluator:
        """Returns what evaluates the model as it is now."""
        size = self.arguments.eval_batch_size
        return Evaluator(self.accelerator, self.model, self.tokenizer, size, num_pairs, num_beams)

    def evaluate(self) -> bool:
        """Evaluates the weights, or their average, on the validation; returns whether they are the best."""
        evaluator = self.evaluator(self.arguments.eval_pairs, num_beams=1)
        with self.average.applied() if self.average else nullcontext():
            scores, outputs = self.task.evaluate(evaluator, self.splits["validation"])
        progress = self.progress
        entry = {"step": progress.step, "train_loss": progress.mean_loss("evaluation"), **scores}
        progress.history.append(entry)
        is_best = progress.judge(scores[self.metric], self.task.metrics[self.metric])
        self.log.write(progress.step, {f"eval_{name}": score for name, score in scores.items()})
        if self.accelerator.is_main_process:
            for line in self.task.show(self.splits["validation"].rows, outputs):
                tqdm.write(f"  {line}")
            tqdm.write(describe(entry) + (", the best so far" if is_best else ""))
            file = self.folder / "training_curve.png"
            if fault := checkpoints.attempt(lambda: records.plot_curve(self.log.read(), self.metric, file)):
                tqdm.write(f"{file} could not be written ({fault})")
            if dropped := self.splits["train"].dropped:
                tqdm.write(report("train, read so far", "", dropped, 0))
        trackable = {f"eval/{name}": score for name, score in scores.items() if not isinstance(score, str)}
        self.accelerator.log(trackable, step=progress.step)
        return is_best

    def write_log(self, update: training.Update, speed: float) -> None:
        """Writes a line of metrics.jsonl, and to the tracker."""
        line = {
            "loss": self.progress.mean_loss("log"),
            "learning_rate": self.scheduler.get_last_lr()[0],
            "grad_norm": update.grad_norm,
            "epoch": self.progress.position["epoch"],
        }
        memory = records.peak_memory(self.accelerator.device)
        timing = {"tokens_per_second": round(speed), "peak_memory": memory}
        self.log.write(self.progress.step, line, timing)
        self.accelerator.log(
            {f"train/{name}": value for name, value in line.items()}, step=self.progress.step
        )

    def check_finite(self, update: training.Update, examples: list[Example]) -> None:
        """
        Raises ValueError after `NOT_FINITE` updates in a row that had to be left out.

        With DeepSpeed after one, for its engine has already changed the weights.
        """
        if update.is_finite:
            self.progress.not_finite = 0
            self.progress.add(update.loss)
            return
        self.progress.not_finite += 1
        numbers = ", ".join(str(row + 1) for row in sorted({example["row"] for example in examples})[:20])
        text = self.tokenizer.decode(examples[0]["input_ids"][:20])
        where = (
            f"update {self.progress.step} (rows {numbers} of those to train on; the first begins {text!r})"
        )
        if self.accelerator.is_main_process:
            tqdm.write(f"loss {update.loss}, gradient {update.grad_norm} in {where}: left out")
        is_changed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        if is_changed or self.progress.not_finite == NOT_FINITE:
            newest = next(reversed(checkpoints.checkpoints(self.folder)), None)
            raise ValueError(
                f"loss or gradient was not finite in {self.progress.not_finite} updates in a row, the last "
                f"being {where}; "
                f"the last good checkpoint is {newest.name if newest else 'none'}. Look at these rows, or "
                f"begin anew with a lower --learning_rate or more --warmup_steps"
            )

    def updates(self) -> Iterator[tuple[training.Update, float]]:
        """Makes one optimizer update after the other; yields what it reports and its tokens per second."""
        arguments, progress = self.arguments, self.progress
        options = {"label_smoothing": arguments.label_smoothing} if arguments.label_smoothing else {}
        batches = self.batches.after(Position(**progress.position))
        for examples, position in islice(batches, self.max_steps - progress.step):
            began = time.perf_counter()
            update = training.update(
                self.accelerator,
                self.model,
                self.optimizer,
                self.scheduler,
                training.micro_batches(
                    self.accelerator,
                    self.task,
                    self.tokenizer,
                    examples,
                    arguments.gradient_accumulation_steps,
                ),
                self.task.count_targets,
                arguments.max_grad_norm,
                **options,
            )
            progress.step, progress.position = progress.step + 1, asdict(position)
            self.check_finite(update, examples)
            if self.average and update.is_finite:
                self.average.update()
            yield update, sum(map(self.task.count_tokens, examples)) / (time.perf_counter() - began)

    def save(self) -> None:
        """Writes a checkpoint."""
        if self.average:
            self.average.gather()
        checkpoints.save_checkpoint(self.accelerator, self.folder, asdict(self.progress))

    def train(self) -> str | None:
        """Trains to the end, or until a signal, whose name is returned."""
        arguments, accelerator = self.arguments, self.accelerator
        bar = tqdm(
            total=self.max_steps,
            initial=self.progress.step,
            desc="train",
            disable=not accelerator.is_main_process,
        )
        self.model.train()
        with bar, checkpoints.StopSignal() as stop:
            for update, speed in self.updates() if not self.is_over else ():
                step = self.progress.step
                show(
                    bar,
                    update,
                    self.scheduler.get_last_lr()[0],
                    speed,
                    records.peak_memory(accelerator.device),
                )
                if step % arguments.logging_steps == 0:
                    self.write_log(update, speed)
                is_best = (step % arguments.eval_steps == 0 or step == self.max_steps) and self.evaluate()
                stopped_by = stop.agreed(accelerator)
                is_last = bool(stopped_by) or self.is_over
                is_due = is_best or step % arguments.save_steps == 0
                # what is not finite may come back: older checkpoints are the better ones to go on from
                if is_last or (is_due and not self.progress.not_finite):
                    self.save()
                if is_last:
                    return stopped_by
        return None

    def finish(self) -> tuple[dict, list[str]]:
        """Takes the best weights, scores them on the test and saves the model; returns scores and samples."""
        progress = self.progress
        best = progress.best_step or progress.step
        if best != progress.step and checkpoints.load_step(self.accelerator, self.folder, best) is None:
            self.accelerator.print(
                f"the best evaluation, after update {best}, left no weights: the last ones become the model"
            )
            progress.best_step = progress.step
        if self.average:
            self.average.swap()
        split = self.splits[self.final_split]
        scores, outputs = self.task.evaluate(self.evaluator(None, self.arguments.num_beams), split)
        save = partial(training.save_model, self.accelerator, self.model, self.folder)
        if fault := checkpoints.attempt(save):
            raise ValueError(f"the model could not be saved ({fault}): make room, then --resume saves it")
        return scores, self.task.show(split.rows, outputs)
