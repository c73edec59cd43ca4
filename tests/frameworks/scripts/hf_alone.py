"""examples/hf_trainer.py as it is often written: on CPUs, Trainer then takes every rank for the only one."""

from __future__ import annotations

from typing import Any

import transformers

from examples import hf_trainer


def not_distributed(**options: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(**{**options, "use_cpu": False})


if __name__ == "__main__":
    hf_trainer.TrainingArguments = not_distributed  # type: ignore[misc]
    hf_trainer.main()
