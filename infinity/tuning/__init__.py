"""Finds the configuration that trains a model fastest on this machine: predict all, measure a few, keep the fastest."""

from infinity.tuning.machine import MachineJob, best_ways, measure_machine
from infinity.tuning.outlook import Bounds, Outlook, Prediction
from infinity.tuning.reasons import Reason, reasons
from infinity.tuning.record import Duel, Record, Run, read_record
from infinity.tuning.search import Outcome, Search
from infinity.tuning.space import KNOBS, Choices, Limits, Setting, choices_of, keys_of, setting_of

__all__ = [
    "KNOBS",
    "Bounds",
    "Choices",
    "Duel",
    "Limits",
    "MachineJob",
    "Outcome",
    "Outlook",
    "Prediction",
    "Reason",
    "Record",
    "Run",
    "Search",
    "Setting",
    "best_ways",
    "choices_of",
    "keys_of",
    "measure_machine",
    "read_record",
    "reasons",
    "setting_of",
]
