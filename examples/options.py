"""Number types for the examples' command lines. argparse reports a value out of range before anything runs."""

import argparse
import math

import torch


def count(text: str) -> int:
    return _at_least(1, int(text))


def count_or_none(text: str) -> int:
    return _at_least(0, int(text))


def positive(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and above 0, got {text}")
    return number


def not_negative(text: str) -> float:
    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and at least 0, got {text}")
    return number


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def fill_in(args: argparse.Namespace, **defaults: tuple[object, object]) -> None:
    """Sets the options that are None to a default, given as (on a GPU, on another `args.device`)."""
    on_gpu = torch.device(args.device).type == "cuda"
    for name, (of_gpu, of_others) in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, of_gpu if on_gpu else of_others)


def _at_least(least: int, number: int) -> int:
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
    return number
