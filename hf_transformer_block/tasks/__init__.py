"""The tasks that scripts/train.py knows."""

from .base import BadRow, Evaluator, Split, Task
from .classification import TextClassification, TokenClassification
from .language_modeling import CausalLM, MaskedLM
from .question_answering import QuestionAnswering
from .translation import Translation


TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (Translation, CausalLM, MaskedLM, TextClassification, TokenClassification, QuestionAnswering)
}

__all__ = ["TASKS", "BadRow", "Evaluator", "Split", "Task", *(task.__name__ for task in TASKS.values())]
