"""The names of the models that a run trains, as they appear in logs, file names, results and sentences."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelName:
    """One model of a run, under each of the names that it goes by."""

    key: str
    """The model's entry in result.json and evaluation.json."""
    log_prefix: str
    """What the names of the model's values in log.jsonl begin with; also the model's entry in a checkpoint."""
    file_prefix: str
    """What the names of the model's own files in the run folder begin with."""
    title: str
    """The model in sentences and tables."""


ONLY = ModelName("model", "", "", "the model")
"""The one model of `hebbian train`."""
PLAIN = ModelName("plain", "plain_", "plain-", "plain softmax")
HEBBIAN = ModelName("hebbian", "hebbian_", "hebbian-", "Hebbian softmax")

TEXTS = {"valid": "validation", "test": "test"}
"""The splits that models are measured on, and how sentences call these texts."""
